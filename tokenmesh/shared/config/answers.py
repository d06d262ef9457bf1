"""AnswerSettings: what answers contain although their requests do not ask for it."""

from pydantic import BaseModel, Field


class AnswerSettings(BaseModel):
    """Part of the gateway's settings."""

    force_include_usage: bool = Field(
        default=False,
        description="End every stream with its usage, as if each request had set "
        "stream_options.include_usage.",
    )
    return_tokens_as_token_ids: bool = Field(
        default=False,
        description="Show tokens of logprobs as `token_id:N` in answers to requests that leave "
        "return_tokens_as_token_ids out.",
    )

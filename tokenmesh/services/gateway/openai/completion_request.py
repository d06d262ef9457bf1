"""CompletionRequest: the body of /v1/completions."""

from pydantic import Field

from tokenmesh.services.gateway.openai.sampling_fields import INT32_MAX, SamplingFields, TokenId

DEFAULT_MAX_TOKENS = 16


class CompletionRequest(SamplingFields):
    """A prompt is text or token ids; a list of either is several prompts."""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]] | None = None
    prompt_embeds: str | list[str] | None = None
    max_tokens: int | None = Field(default=DEFAULT_MAX_TOKENS, ge=0, le=INT32_MAX)
    logprobs: int | None = Field(default=None, ge=-1, le=INT32_MAX)
    add_special_tokens: bool = True
    suffix: str | None = None

    # Known and not served yet.
    best_of: int | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt by itself; those of `prompt_embeds` are none of them."""
        if self.prompt is None:
            return []
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [list(self.prompt)]
        return list(self.prompt)  # type: ignore[arg-type]

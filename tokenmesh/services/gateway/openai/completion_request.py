"""CompletionRequest: the body of /v1/completions."""

from tokenmesh.services.gateway.openai.lenient import MinusOneOrMore, NotNegative, On
from tokenmesh.services.gateway.openai.sampling_fields import SamplingFields, TokenId

DEFAULT_MAX_TOKENS = 16


class CompletionRequest(SamplingFields):
    """A prompt is text or token ids; a list of either is several prompts."""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]] | None = None
    prompt_embeds: str | list[str] | None = None
    max_tokens: NotNegative | None = DEFAULT_MAX_TOKENS
    logprobs: MinusOneOrMore | None = None
    add_special_tokens: On = True
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
            return [self.prompt]
        return list(self.prompt)  # type: ignore[arg-type]

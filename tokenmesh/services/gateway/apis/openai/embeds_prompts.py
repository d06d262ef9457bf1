"""Prompts of a completion that are tensors: each is sent by reference, like an encoder's output."""

from tokenmesh.services.gateway.apis.openai.prompt_embeds import store_tensor
from tokenmesh.services.gateway.apis.openai.request import CompletionRequest
from tokenmesh.services.gateway.core.http.errors import invalid
from tokenmesh.shared.blobs import Blobs
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import FieldPath
from tokenmesh.shared.messages.beat import ModelCard
from tokenmesh.shared.messages.tokenize import IdsPrompt
from tokenmesh.shared.tokens import pack_ids

_NAME = "prompt_embeds"
_PLACEHOLDER = 0
"""The token id in place of each embedding; it is not read."""


async def read_embeds(
    body: CompletionRequest, card: ModelCard, blobs: Blobs, limits: GatewaySettings
) -> list[IdsPrompt]:
    """The tensors of the body, each a prompt with one token id a row. Raises InvalidInput."""
    given = [body.prompt_embeds] if isinstance(body.prompt_embeds, str) else body.prompt_embeds
    if not given:
        return []
    _check_others(body)
    if len(given) > limits.max_choices:
        raise invalid(_NAME, f"holds more than {limits.max_choices} tensors (gateway.max_choices)")
    found = []
    for index, text in enumerate(given):
        path: FieldPath = (_NAME, index) if len(given) > 1 else (_NAME,)
        item = await store_tensor(text, card, blobs, limits, path)
        ids = pack_ids([_PLACEHOLDER] * item.length)
        found.append(IdsPrompt(token_ids=ids, media=[item]))
    return found


def _check_others(body: CompletionRequest) -> None:
    wanted = {
        "echo": body.echo,
        "suffix": body.suffix,
        "prompt_logprobs": body.prompt_logprobs is not None,
        "truncate_prompt_tokens": body.truncate_prompt_tokens is not None,
    }
    for name, is_wanted in wanted.items():
        if is_wanted:
            raise invalid(name, f"cannot be combined with {_NAME}")

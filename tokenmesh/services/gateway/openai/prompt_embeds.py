"""prompt_embeds: a prompt as a tensor. Like an encoder's output it is sent by reference."""

import asyncio
import base64
import binascii
from dataclasses import dataclass

from tokenmesh.services.gateway.extras.tensor_upload import read_tensor
from tokenmesh.services.gateway.http.errors import NotSupported
from tokenmesh.services.gateway.openai.request import CompletionRequest
from tokenmesh.shared.blobs import Blobs
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.messages.beat import ModelCard
from tokenmesh.shared.messages.media import EMBEDS, MediaItem
from tokenmesh.shared.messages.tokenize import IdsPrompt
from tokenmesh.shared.tensor_blob import TensorBlob
from tokenmesh.shared.tokens import pack_ids

_NAME = "prompt_embeds"
_PLACEHOLDER = 0
"""The token id in place of each embedding; it is not read."""


@dataclass(frozen=True, slots=True)
class EmbedsPrompt:
    """A tensor in the blob store."""

    item: MediaItem

    @property
    def placeholders(self) -> IdsPrompt:
        """One token id for each row of the tensor."""
        return IdsPrompt(token_ids=pack_ids([_PLACEHOLDER] * self.item.length))

    def salt(self, cache_salt: str | None) -> str:
        """Only equal tensors with the same salt share blocks."""
        return f"{_NAME}:{self.item.content_hash}:{cache_salt or ''}"


async def read_embeds(
    body: CompletionRequest, card: ModelCard, blobs: Blobs, limits: GatewaySettings
) -> list[EmbedsPrompt]:
    """The tensors of the body. Raises InvalidInput."""
    given = [body.prompt_embeds] if isinstance(body.prompt_embeds, str) else body.prompt_embeds
    if not given:
        return []
    _check_others(body, limits)
    if len(given) > limits.max_choices:
        raise InvalidInput(f"{_NAME} holds over {limits.max_choices} tensors", param=_NAME)
    found = []
    for index, text in enumerate(given):
        where = f"{_NAME}[{index}]" if len(given) > 1 else _NAME
        blob = await asyncio.to_thread(_decode, text, where)
        _check_shape(blob, card, where)
        key = await blobs.put(blob.encode(), ttl_s=limits.media_ttl_s)
        item = MediaItem(
            kind=EMBEDS,
            content_hash=key,
            offset=0,
            length=blob.shape[0],
            pixels=key,
            embeddings=key,
        )
        found.append(EmbedsPrompt(item))
    return found


def _check_others(body: CompletionRequest, limits: GatewaySettings) -> None:
    if not limits.prompt_embeds:
        raise NotSupported(f"{_NAME} is not served here: see --enable-prompt-embeds", param=_NAME)
    wanted = {
        "echo": body.echo,
        "suffix": body.suffix,
        "prompt_logprobs": body.prompt_logprobs is not None,
        "truncate_prompt_tokens": body.truncate_prompt_tokens is not None,
    }
    for name, is_wanted in wanted.items():
        if is_wanted:
            raise InvalidInput(f"{name} does not go with {_NAME}", param=name)


def _decode(text: str, where: str) -> TensorBlob:
    try:
        return read_tensor(base64.b64decode(text, validate=True))
    except binascii.Error as error:
        raise InvalidInput(f"{where} is not base64: {error}", param=where) from error
    except ValueError as error:
        raise InvalidInput(f"{where}: {error}", param=where) from error


def _check_shape(blob: TensorBlob, card: ModelCard, where: str) -> None:
    is_right = len(blob.shape) == 2 and blob.shape[0] > 0
    if not is_right or blob.shape[1] != card.hidden_size:
        raise InvalidInput(
            f"{where} has the shape {list(blob.shape)}, not [tokens, {card.hidden_size}]",
            param=where,
        )

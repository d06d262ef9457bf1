"""HeldPrompts: large prompts that stay in their gateway while a tokenizer reads them in parts.

NATS forwards each message whole: one of several MiB would take twice its size there and delay the
tokens behind it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import msgspec

from tokenmesh.shared import subjects
from tokenmesh.shared.bus.base import Bus, Envelope, Subscription
from tokenmesh.shared.errors import NotFound, PayloadTooLarge, ProtocolError
from tokenmesh.shared.ids import GatewayId
from tokenmesh.shared.messages import PromptRead, ReadPrompt, Tokenize
from tokenmesh.shared.messages.failed import to_failed
from tokenmesh.shared.messages.tokenize import PROMPT_PART_BYTES, ChatPrompt, HeldPrompt, TextPrompt


class HeldPrompts:
    """The prompts of one gateway, each kept while its Tokenize request is open."""

    def __init__(self, bus: Bus, gateway: GatewayId) -> None:
        self._bus = bus
        self._gateway = gateway
        self._numbers = count()
        self._held: dict[int, bytes] = {}
        self._subscription: Subscription | None = None

    def __len__(self) -> int:
        return len(self._held)

    async def start(self) -> None:
        """Listen for ReadPrompt messages."""
        subject = subjects.gateway_prompts(self._gateway)
        self._subscription = await self._bus.subscribe(subject, self._receive)

    async def stop(self) -> None:
        if self._subscription is not None:
            await self._subscription.stop()

    @contextmanager
    def holding(self, message: Tokenize, most: int) -> Iterator[Tokenize]:
        """Yields the message to send in the block. Raises PayloadTooLarge above `most` bytes."""
        num_bytes = prompt_size(message)
        # Packing a prompt that is refused anyway would double its memory.
        data = b"" if num_bytes > most else _packed(message, num_bytes)
        if max(len(data), num_bytes) > most:
            raise PayloadTooLarge(
                f"the prompt is larger than the {most} bytes of a message (bus.max_message_bytes)"
            )
        if len(data) <= PROMPT_PART_BYTES:
            yield message
            return
        number = next(self._numbers)
        prompt = HeldPrompt(gateway=self._gateway, number=number, num_bytes=len(data))
        self._held[number] = data
        try:
            yield msgspec.structs.replace(message, prompt=prompt)
        finally:
            del self._held[number]

    async def _receive(self, envelope: Envelope) -> None:
        message = envelope.message
        if not isinstance(message, ReadPrompt):
            raise ProtocolError(f"expected ReadPrompt, got {type(message).__name__}")
        data = self._held.get(message.number)
        if data is None:
            error = NotFound(f"prompt {message.number} is no longer available")
            await self._bus.reply(envelope, to_failed(error))
            return
        start = max(0, message.offset)
        await self._bus.reply(envelope, PromptRead(data=data[start : start + PROMPT_PART_BYTES]))


def prompt_size(message: Tokenize) -> int:
    """Least size of the text or ids in bytes."""
    prompt = message.prompt
    match prompt:
        case TextPrompt():
            return len(prompt.text)
        case ChatPrompt():
            return sum(
                map(len, (prompt.messages_json, prompt.tools_json or b"", prompt.prediction))
            )
        case HeldPrompt():
            return prompt.num_bytes
    return len(prompt.token_ids)


def _packed(message: Tokenize, num_bytes: int) -> bytes:
    # A character takes up to four bytes.
    is_small = 4 * num_bytes <= PROMPT_PART_BYTES
    return b"" if is_small else msgspec.msgpack.encode(message.prompt)

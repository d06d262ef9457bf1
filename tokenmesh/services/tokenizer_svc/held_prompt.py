"""Reading a large prompt from the gateway that holds it, part by part."""

from typing import Final

import msgspec

from tokenmesh.shared.bus.base import Bus
from tokenmesh.shared.errors import PayloadTooLarge, ProtocolError
from tokenmesh.shared.messages import PromptRead, ReadPrompt, Tokenize
from tokenmesh.shared.messages.tokenize import ChatPrompt, HeldPrompt, IdsPrompt, TextPrompt
from tokenmesh.shared.subjects import gateway_prompts

_Prompt = TextPrompt | IdsPrompt | ChatPrompt

_decoder: Final[msgspec.msgpack.Decoder[_Prompt]] = msgspec.msgpack.Decoder(_Prompt)


async def with_prompt(bus: Bus, message: Tokenize, deadline_s: float) -> Tokenize:
    """The question with the prompt itself. Raises PayloadTooLarge, ProtocolError and the bus's."""
    held = message.prompt
    if not isinstance(held, HeldPrompt):
        return message
    most = bus.max_message_bytes
    if held.num_bytes > most:
        raise PayloadTooLarge(f"the prompt is larger than the {most} bytes of a message")
    data = await _read(bus, held, deadline_s)
    try:
        return msgspec.structs.replace(message, prompt=_decoder.decode(data))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"undecodable prompt: {error}") from error


async def _read(bus: Bus, held: HeldPrompt, deadline_s: float) -> bytearray:
    data, subject = bytearray(), gateway_prompts(held.gateway)
    while len(data) < held.num_bytes:
        question = ReadPrompt(number=held.number, offset=len(data))
        answer = await bus.request(subject, question, deadline_s=deadline_s)
        if not isinstance(answer, PromptRead) or not answer.data:
            raise ProtocolError(f"{type(answer).__name__} instead of a part of a prompt")
        data += answer.data
    return data

"""The messages between the tokenizer and its rendering processes: a job, and one of two answers.

They are JSON, which can hold any number that a client sends; shared/child_pool.py transports them.
"""

from typing import Final, Literal

import msgspec

from tokenmesh.shared.errors import FieldPath
from tokenmesh.shared.messages.tokenize import FieldWarning

JsonObject = dict[str, object]


class RenderJob(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One conversation for one template."""

    template: str
    messages: list[JsonObject] = []
    """Content parts are {"type": "text", "text": ...} or {"type": kind of media}, as in
    messages.py."""
    tools: list[JsonObject] | None = None
    documents: list[JsonObject] | None = None
    variables: JsonObject = {}
    """Special tokens by name (`bos_token`) and the request's `chat_template_kwargs`."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    merges_system: bool = False
    """As in ChatPrompt."""
    placeholders: dict[str, str] = {}
    """The text for an item by its kind, for templates that expect content as a string."""
    max_chars: int
    compile_only: bool = False
    """Only compile the template."""


class Rendered(msgspec.Struct, frozen=True, tag=True):
    text: str
    warnings: list[FieldWarning] = []


FailureKind = Literal["syntax", "raised", "input", "error", "too_long", "memory"]


class RenderFailed(msgspec.Struct, frozen=True, tag=True):
    """The failure of a job.

    syntax: the template does not compile; raised: it called raise_exception; input: no template can
    render the messages; error: it failed on these messages; too_long, memory: it exceeds a limit.
    """

    kind: FailureKind
    reason: str
    line: int | None = None
    """Line of the template."""
    path: FieldPath = ()
    """The field at fault, within `messages`."""


RenderAnswer = Rendered | RenderFailed

_encoder: Final = msgspec.json.Encoder()
_job_decoder: Final = msgspec.json.Decoder(RenderJob)
_answer_decoder: Final[msgspec.json.Decoder[RenderAnswer]] = msgspec.json.Decoder(RenderAnswer)


def encode(message: RenderJob | RenderAnswer) -> bytes:
    return _encoder.encode(message)


def decode_job(data: bytes) -> RenderJob:
    return _job_decoder.decode(data)


def decode_answer(data: bytes) -> RenderAnswer:
    return _answer_decoder.decode(data)

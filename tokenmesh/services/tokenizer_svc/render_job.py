"""What the tokenizer and its rendering processes say to each other: a job, one of two answers.

Both are JSON, which holds any number that a client may send; how they travel is
shared/child_pool.py's.
"""

from typing import Final, Literal

import msgspec

from tokenmesh.shared.errors import FieldPath

JsonObject = dict[str, object]


class RenderJob(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One conversation for one template."""

    template: str
    messages: list[JsonObject] = []
    """Content parts are {"type": "text", "text": ...} or {"type": "image"} (see messages.py)."""
    tools: list[JsonObject] | None = None
    documents: list[JsonObject] | None = None
    variables: JsonObject = {}
    """Special tokens by name (`bos_token`) and the request's `chat_template_kwargs`."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    image_placeholder: str = ""
    """What stands for an image in the text of a template that takes content as a string."""
    max_chars: int
    compile_only: bool = False
    """Only say whether the template is sound; nothing is rendered."""


class Rendered(msgspec.Struct, frozen=True, tag=True):
    """The prompt's text."""

    text: str


FailureKind = Literal["syntax", "raised", "input", "error", "too_long", "memory"]


class RenderFailed(msgspec.Struct, frozen=True, tag=True):
    """Why there is none.

    syntax: the template does not compile; raised: it called raise_exception; input: the messages
    cannot be given to any template; error: it failed on these messages; too_long, memory: a bound.
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
    """The bytes of a message."""
    return _encoder.encode(message)


def decode_job(data: bytes) -> RenderJob:
    """The job in a message. Raises msgspec.DecodeError."""
    return _job_decoder.decode(data)


def decode_answer(data: bytes) -> RenderAnswer:
    """The answer in a message. Raises msgspec.DecodeError."""
    return _answer_decoder.decode(data)

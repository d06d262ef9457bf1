"""Messages between the worker and its compiling processes: a job, and one of two answers.

All of it is msgpack; how it travels is shared/child_pool.py's.
"""

from typing import Final, Literal

import msgspec

from tokenmesh.engine.api.structured import Structured

BackendName = Literal["xgrammar", "guidance"]


class CompileSetup(msgspec.Struct, frozen=True):
    """Settings of a process, as JSON on its command line."""

    tokenizer_file: str
    vocab_size: int
    eos_ids: list[int]
    time_s: float
    memory_bytes: int
    grammar_bytes: int
    """Largest compiled grammar."""
    backends: list[BackendName]
    """Backends that jobs may use, loaded when the process starts."""


class CompileJob(msgspec.Struct, frozen=True):
    """One grammar; None checks that the process is ready, with its libraries loaded."""

    backend: BackendName
    structured: Structured | None


class Compiled(msgspec.Struct, frozen=True, tag=True):
    """The grammar, for `Backend.load`."""

    data: bytes


class NotCompiled(msgspec.Struct, frozen=True, tag=True):
    """Why the grammar does not compile."""

    reason: str


CompileAnswer = Compiled | NotCompiled

_encoder: Final = msgspec.msgpack.Encoder()
_job_decoder: Final = msgspec.msgpack.Decoder(CompileJob)
_answer_decoder: Final[msgspec.msgpack.Decoder[CompileAnswer]] = msgspec.msgpack.Decoder(
    CompileAnswer
)


def encode(message: CompileJob | CompileAnswer) -> bytes:
    """The bytes of a message."""
    return _encoder.encode(message)


def decode_job(data: bytes) -> CompileJob:
    """The job in a message. Raises msgspec.DecodeError."""
    return _job_decoder.decode(data)


def decode_answer(data: bytes) -> CompileAnswer:
    """The answer in a message. Raises msgspec.DecodeError."""
    return _answer_decoder.decode(data)

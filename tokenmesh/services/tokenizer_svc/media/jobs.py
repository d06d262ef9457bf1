"""Jobs of the processes that read the media of chats: their bytes, their answers, their loop.

The kernel enforces a process' limits for any file: it kills the process when the alarm of a job
goes off, and refuses memory beyond its address space, files, connections and further processes.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from tokenmesh.services.tokenizer_svc.media.confine import confine
from tokenmesh.services.tokenizer_svc.media.processor import read_options
from tokenmesh.shared.child_pool import serve
from tokenmesh.shared.errors import InvalidInput, PayloadTooLarge
from tokenmesh.shared.messages.media import AUDIO, IMAGE, VIDEO

PREPARED: Final = b"p"
INVALID: Final = b"i"
TOO_LARGE: Final = b"l"
"""First byte of an answer; an encoded PreparedItem follows the first, a text the others."""

NOUN: Final = {IMAGE: "the image", VIDEO: "the video", AUDIO: "the recording"}

Prepare = Callable[[bytes], bytes]
"""A job -> an encoded PreparedItem. Raises InvalidInput or PayloadTooLarge."""


def job_of(data: bytes, options: bytes = b"") -> bytes:
    """A file, and the JSON of `mm_processor_kwargs` or nothing."""
    return b"".join((len(options).to_bytes(4, "little"), options, data))


def file_of(job: bytes) -> bytes:
    """The file of a job."""
    return job[4 + int.from_bytes(job[:4], "little") :]


def options_of(job: bytes) -> dict[str, Any]:
    """The options of a job. Raises InvalidInput."""
    return read_options(job[4 : 4 + int.from_bytes(job[:4], "little")])


def answer(prepare: Prepare, kind: str, job: bytes) -> bytes:
    """Execute one job; every failure is an answer."""
    try:
        return PREPARED + prepare(job)
    except PayloadTooLarge as error:
        return TOO_LARGE + error.message.encode()
    except InvalidInput as error:
        return INVALID + error.message.encode()
    except MemoryError:
        return TOO_LARGE + f"{NOUN[kind]} needs more memory than decoding may use".encode()


def serve_jobs(prepare: Prepare, kind: str, time_s: float, memory_bytes: int) -> None:
    """Answer jobs from stdin on stdout until stdin ends. No file can be opened any more."""
    confine(memory_bytes)
    serve(
        sys.stdin.buffer, sys.stdout.buffer, time_s, lambda job: partial(answer, prepare, kind, job)
    )

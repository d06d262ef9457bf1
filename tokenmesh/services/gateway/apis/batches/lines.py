"""Lines of a batch: those of its input, checked one by one, and those of its output and errors."""

from codecs import BOM_UTF8
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Final

import msgspec
import xxhash

from tokenmesh.services.gateway.apis.batches.records import AnsweredLine, BatchState
from tokenmesh.services.gateway.core.http.event_loop import Turns

_NEWLINE: Final = b"\n"
_MAX_ID_CHARS: Final = 512


@dataclass(frozen=True, slots=True)
class InputLine:
    """One line that is not empty."""

    index: int
    """From 0, empty lines included."""
    data: bytes | None
    """None: it is longer than a line may be."""


async def split_lines(
    chunks: AsyncIterator[bytes], max_bytes: int
) -> AsyncGenerator[InputLine, None]:
    """The lines of a file; in memory are a chunk and one line. Must be closed."""
    turns, rest, index, is_long = Turns(), b"", 0, False
    async for chunk in chunks:
        *lines, tail = chunk.split(_NEWLINE)
        for line in lines:
            await turns.rest()
            whole, rest = rest + line, b""
            if index == 0:
                whole = whole.removeprefix(BOM_UTF8)  # some programs begin a file with it
            if is_long or len(whole) > max_bytes:
                yield InputLine(index, None)
            elif not whole.isspace() and whole:
                yield InputLine(index, whole)
            index, is_long = index + 1, False
        rest += tail
        if len(rest) > max_bytes:
            rest, is_long = b"", True
    if is_long:
        yield InputLine(index, None)
    elif rest and not rest.isspace():
        yield InputLine(index, rest.removeprefix(BOM_UTF8) if index == 0 else rest)


@dataclass(frozen=True, slots=True)
class LineRequest:
    """A line that is a request."""

    custom_id: str
    body: bytes


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is not; it goes to the errors."""

    custom_id: str | None
    code: str
    message: str


class _Line(msgspec.Struct):
    custom_id: str
    body: msgspec.Raw
    method: str = "POST"
    url: str | None = None


_NULL: Final = msgspec.Raw(b"null")


class _Body(msgspec.Struct):
    stream: msgspec.Raw = _NULL
    background: msgspec.Raw = _NULL


_line_decoder: Final = msgspec.json.Decoder(_Line)
_body_decoder: Final = msgspec.json.Decoder(_Body)


class LineChecker:
    """Checks the lines of one file in their order; the second of two equal ids is refused."""

    def __init__(self, endpoint: str, max_bytes: int) -> None:
        self._endpoint = endpoint
        self._max_bytes = max_bytes
        self._seen: set[int] = set()

    def check(self, line: InputLine) -> LineRequest | BadLine:
        """Return what the line is."""
        if line.data is None:
            return BadLine(
                None,
                "line_too_long",
                f"the line has more than batches.max_line_bytes = {self._max_bytes}",
            )
        try:
            request = _line_decoder.decode(line.data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return BadLine(None, "invalid_json_line", f"the line is not a request: {error}"[:500])
        return self._problem(request) or LineRequest(request.custom_id, bytes(request.body))

    def _problem(self, request: _Line) -> BadLine | None:
        custom_id = request.custom_id
        if not 0 < len(custom_id) <= _MAX_ID_CHARS:
            text = f"custom_id must have 1 to {_MAX_ID_CHARS} characters"
            return BadLine(None, "invalid_custom_id", text)
        number = xxhash.xxh3_64_intdigest(custom_id.encode("utf-8", "surrogatepass"))
        if number in self._seen:
            return BadLine(custom_id, "duplicate_custom_id", "an earlier line has this custom_id")
        self._seen.add(number)
        if request.method != "POST":
            return BadLine(custom_id, "invalid_method", "method must be POST")
        if request.url != self._endpoint:
            text = f"url must be the endpoint of the batch, {self._endpoint}"
            return BadLine(custom_id, "mismatched_endpoint", text)
        try:
            body = _body_decoder.decode(request.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return BadLine(custom_id, "invalid_body", f"body: {error}"[:500])
        for name, value in (("stream", body.stream), ("background", body.background)):
            if bytes(value).strip() not in (b"false", b"null"):
                return BadLine(
                    custom_id, "not_supported", f"{name} cannot be combined with a batch"
                )
        return None


_OK: Final = 200


class _Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _Problem(msgspec.Struct):
    code: str
    message: str


class _OutputLine(msgspec.Struct):
    id: str
    custom_id: str | None
    response: _Response | None
    error: _Problem | None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    """Chats and completions name their tokens in one way, responses in another."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    model: str | None = None
    usage: _Usage | None = None


_answer_decoder: Final = msgspec.json.Decoder(_Answer)


def answered(
    index: int, request: LineRequest, request_id: str, status: int, body: bytes
) -> AnsweredLine:
    """The answer to a request, whatever its status."""
    response = _Response(status, request_id, msgspec.Raw(body))
    line = _OutputLine(request_id, request.custom_id, response, None)
    return AnsweredLine(index, status != _OK, _encoded(line))


def not_run(index: int, bad: BadLine, request_id: str) -> AnsweredLine:
    """The error of a line that was not run."""
    problem = _Problem(bad.code, bad.message)
    return AnsweredLine(
        index, True, _encoded(_OutputLine(request_id, bad.custom_id, None, problem))
    )


def _encoded(line: _OutputLine) -> bytes:
    return msgspec.json.encode(line) + b"\n"


def count(state: BatchState, line: AnsweredLine) -> None:
    """Add a line to the counts."""
    if line.is_error:
        state.failed += 1
        state.error_bytes += len(line.data)
    else:
        state.completed += 1
        state.output_bytes += len(line.data)


def count_usage(state: BatchState, body: bytes) -> None:
    """Add the usage of an answer to that of the batch."""
    try:
        answer = _answer_decoder.decode(body)
    except msgspec.DecodeError:
        return
    state.model = state.model or answer.model
    usage = answer.usage
    if usage is None:
        return
    state.input_tokens += usage.prompt_tokens + usage.input_tokens
    state.output_tokens += usage.completion_tokens + usage.output_tokens
    given = usage.prompt_tokens_details or usage.input_tokens_details or _Details()
    made = usage.completion_tokens_details or usage.output_tokens_details or _Details()
    state.cached_tokens += given.cached_tokens or 0
    state.reasoning_tokens += made.reasoning_tokens or 0

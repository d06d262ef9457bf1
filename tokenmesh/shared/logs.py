"""Logs of a process: JSON or human lines on stderr, bound to the request and its trace.

Modules log through `logging.getLogger(__name__)` as always; `start_logging` gives the root logger
its one handler.
"""

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Final, TextIO

from tokenmesh.shared.config.mesh import TelemetrySettings
from tokenmesh.shared.ids import InstanceId, RequestId
from tokenmesh.shared.log_fields import PROGRESS
from tokenmesh.shared.telemetry.span import current_trace_id

_request_id: Final[ContextVar[RequestId | None]] = ContextVar("request_id", default=None)

_CHATTY: Final = ("asyncio", "httpcore", "httpx", "nats", "opentelemetry", "urllib3", "uvicorn")
"""Libraries whose `info` records are of no interest here."""
_SHOWN_ID_CHARS: Final = 8


@contextmanager
def bind_request(request_id: RequestId) -> Iterator[None]:
    """Every record made in the block, and in tasks started there, has the request's id."""
    token = _request_id.set(request_id)
    try:
        yield
    finally:
        _request_id.reset(token)


def start_logging(
    service: str,
    instance_id: InstanceId,
    settings: TelemetrySettings,
    stream: TextIO | None = None,
) -> None:
    """Replace the handlers of the root logger by one that writes to `stream` (default: stderr)."""
    formatter = (
        JsonFormatter(service, instance_id)
        if settings.log_format == "json"
        else HumanFormatter(service)
    )
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(formatter)
    level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    for name in _CHATTY:
        library = logging.getLogger(name)
        library.handlers = []
        library.propagate = True
        library.setLevel(max(level, logging.WARNING))
    logging.captureWarnings(True)


class JsonFormatter(logging.Formatter):
    """One JSON object a line, UTC timestamps, exceptions as text in `exception`."""

    def __init__(self, service: str, instance_id: InstanceId) -> None:
        super().__init__()
        self._constant = {"service": service, "instance": instance_id}

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC)
        fields: dict[str, object] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._constant,
        }
        if request_id := _request_id.get():
            fields["request_id"] = request_id
        if trace_id := current_trace_id():
            fields["trace_id"] = trace_id
        if (share := getattr(record, PROGRESS, None)) is not None:
            fields[PROGRESS] = share
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


class HumanFormatter(logging.Formatter):
    """`10:41:07.123 WARNING worker    engine: text [chatcmpl-1f3a trace 5f0c...]`, local time."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """The line, and the lines of an exception below it."""
        at = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        name = record.name.rpartition(".")[2]
        message = _indented(record.getMessage())
        line = f"{at} {record.levelname:<7} {self._service:<9} {name}: {message}"
        bound = [request_id] if (request_id := _request_id.get()) else []
        if trace_id := current_trace_id():
            bound.append(RequestId(f"trace {trace_id[:_SHOWN_ID_CHARS]}"))
        if bound:
            line += f" [{' '.join(bound)}]"
        if record.exc_info:
            line += "\n" + _indented(self.formatException(record.exc_info))
        return line


def printable(text: str) -> str:
    """Text of which clients chose parts, without what a terminal would obey."""
    return "".join(map(_shown, text))


def _shown(char: str) -> str:
    return char if char.isprintable() or char in "\n\t" else repr(char)[1:-1]


def _indented(text: str) -> str:
    """Its further lines do not look like records of their own."""
    return printable(text).replace("\n", "\n  ")

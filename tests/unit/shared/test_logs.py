"""Logs: their two formats, what they are bound to, and how they are held back."""

import asyncio
import io
import json
import logging
import warnings
from collections.abc import Iterator

import pytest

from tokenmesh.shared.config.mesh import LogFormat, LogLevel, TelemetrySettings
from tokenmesh.shared.ids import InstanceId, RequestId
from tokenmesh.shared.logs import bind_request, start_logging
from tokenmesh.shared.telemetry import span

logger = logging.getLogger("tokenmesh.engine.core.engine")
IN_TRACE = f"00-{'a' * 32}-{'b' * 16}-01"


@pytest.fixture(autouse=True)
def _untouched_root() -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers, root.level
    yield
    root.handlers, root.level = before
    logging.captureWarnings(False)


def start(log_format: LogFormat, log_level: LogLevel = "info") -> io.StringIO:
    stream = io.StringIO()
    settings = TelemetrySettings(log_format=log_format, log_level=log_level)
    start_logging("worker", InstanceId("worker-1"), settings, stream)
    return stream


def test_a_json_line_has_the_facts() -> None:
    stream = start("json")
    logger.warning("%d blocks left", 3)
    line = json.loads(stream.getvalue())
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "warning",
        "logger": "tokenmesh.engine.core.engine",
        "message": "3 blocks left",
        "service": "worker",
        "instance": "worker-1",
    }


def test_records_bear_request_and_trace_also_in_tasks() -> None:
    stream = start("json")

    async def work() -> None:
        logger.info("working")

    async def handle(name: str) -> None:
        with bind_request(RequestId(name)), span("generate", parent=IN_TRACE):
            await asyncio.create_task(work())

    async def both() -> None:
        await asyncio.gather(handle("chatcmpl-1"), handle("chatcmpl-2"))

    asyncio.run(both())
    logger.info("outside")
    first, second, outside = map(json.loads, stream.getvalue().splitlines())
    assert [first["request_id"], second["request_id"]] == ["chatcmpl-1", "chatcmpl-2"]
    assert first["trace_id"] == "a" * 32
    assert not {"request_id", "trace_id"} & outside.keys()


def test_an_exception_stays_one_json_line() -> None:
    stream = start("json")
    try:
        raise ValueError("broken\nhere")
    except ValueError:
        logger.exception("step failed")
    (line,) = stream.getvalue().splitlines()
    assert "ValueError: broken\nhere" in json.loads(line)["exception"]


def test_a_human_line_is_short_and_bound() -> None:
    stream = start("human")
    with bind_request(RequestId("chatcmpl-1")), span("generate", parent=IN_TRACE):
        logger.warning("slow step")
    line = stream.getvalue().rstrip("\n")
    assert line[12:] == (" WARNING worker    engine: slow step [chatcmpl-1 trace aaaaaaaa]")


def test_a_human_exception_is_shown_below_its_line() -> None:
    stream = start("human")
    try:
        raise ValueError("broken")
    except ValueError:
        logger.exception("step failed")
    first, *_, last = stream.getvalue().splitlines()
    assert first.endswith("engine: step failed")
    assert last == "  ValueError: broken"


def test_the_level_holds_back_what_is_below() -> None:
    stream = start("human", "warning")
    logger.info("unseen")
    logger.warning("seen")
    assert "unseen" not in stream.getvalue()
    assert "seen" in stream.getvalue()


def test_libraries_say_only_what_matters() -> None:
    stream = start("human")
    logging.getLogger("httpx").info("HTTP Request: GET ...")
    logging.getLogger("uvicorn.error").info("Started server process")
    logging.getLogger("httpx").warning("a real problem")
    (line,) = stream.getvalue().splitlines()
    assert "a real problem" in line


def test_warnings_become_records() -> None:
    stream = start("json")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("old api", UserWarning, stacklevel=1)
    assert "old api" in json.loads(stream.getvalue())["message"]


def test_what_a_client_wrote_neither_forges_a_record_nor_commands_a_terminal() -> None:
    stream = start("human")
    logger.warning("no model %s", "x\n10:41:07.123 ERROR   forged\x1b[2J\x9b\u202e")
    first, second = stream.getvalue().splitlines()
    assert first.endswith("no model x")
    assert second == "  10:41:07.123 ERROR   forged\\x1b[2J\\x9b\\u202e"

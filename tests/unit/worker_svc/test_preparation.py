"""A request waits for its grammar outside of the engine, and the worker's answer does not."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from tests.unit.worker_svc.conftest import MakeRequest
from tokenmesh.engine.core.sim import SimRunner, SimVocabulary
from tokenmesh.engine.grammar.matcher import Grammar, Matcher
from tokenmesh.engine.request.request import Request
from tokenmesh.services.worker_svc.grammar.compiler import GrammarCompiler
from tokenmesh.services.worker_svc.load import LoadBook
from tokenmesh.services.worker_svc.loaded import SimModel
from tokenmesh.services.worker_svc.preparation import RequestPreparation
from tokenmesh.services.worker_svc.streams import WorkerStreams
from tokenmesh.services.worker_svc.thread import Add
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import InvalidInput, Overloaded, TokenMeshError
from tokenmesh.shared.messages.structured import Structured

SETTINGS = WorkerSettings(engine="sim")
REGEX = Structured(kind="regex", text="a")


class FakeGrammar:
    num_bytes = 1

    def start(self) -> Matcher:
        raise AssertionError


class FakeCompiler(GrammarCompiler):
    """Compiles when a test lets it."""

    def __init__(self) -> None:
        super().__init__(Path("none"), 10, frozenset({2}), SETTINGS)
        self.known: Grammar | None = None
        self.outcome: asyncio.Future[Grammar] = asyncio.get_running_loop().create_future()

    def find(self, structured: Structured) -> Grammar | None:
        return self.known

    async def compile(self, structured: Structured, share: str = "") -> Grammar:
        return await asyncio.shield(self.outcome)


class FakeHost:
    def __init__(self) -> None:
        self.requests: list[Request] = []

    def submit(self, command: Add) -> None:
        self.requests.append(command.request)


class Rig:
    def __init__(self, compiler: FakeCompiler | None) -> None:
        vocabulary = SimVocabulary(10, (2,))
        runner = SimRunner(vocabulary, SETTINGS, lambda seconds: None)
        loaded = SimModel(runner, 64, 10, frozenset({2}))
        self.host = FakeHost()
        self.streams = WorkerStreams(SETTINGS)
        self.book = LoadBook(SETTINGS, 64)
        self.compiler = cast(FakeCompiler, compiler)
        self.preparation = RequestPreparation(
            SETTINGS,
            loaded,
            cast(Any, self.host),
            self.streams,
            self.book,
            cast(Any, None),
            compiler,
        )

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig(FakeCompiler())
    yield rig
    await rig.preparation.stop()


async def begin(rig: Rig, make_request: MakeRequest, stream: int = 1) -> Request:
    request = make_request(stream, [3, 4, 5], sampling={"structured": REGEX})
    await rig.preparation.begin(request)
    return request


async def test_it_enters_when_its_grammar_is_there(rig: Rig, make_request: MakeRequest) -> None:
    request = await begin(rig, make_request)
    await rig.settle()
    assert rig.host.requests == []
    assert rig.book.load().waiting == 1
    rig.compiler.outcome.set_result(FakeGrammar())
    await rig.settle()
    assert rig.host.requests == [request]
    assert request.prepared.grammar is not None
    assert request.prepared.refusal is None
    assert rig.book.num_preparing == 0
    assert request.timeline.grammar_ns > 0


async def test_a_known_grammar_is_not_waited_for(rig: Rig, make_request: MakeRequest) -> None:
    rig.compiler.known = FakeGrammar()
    request = await begin(rig, make_request)
    assert rig.host.requests == [request]
    assert request.prepared.grammar is rig.compiler.known
    assert request.timeline.grammar_ns == 0


@pytest.mark.parametrize("error", [InvalidInput("no such", param="f"), Overloaded("many")])
async def test_it_enters_with_the_reason_why_there_is_none(
    rig: Rig, make_request: MakeRequest, error: TokenMeshError
) -> None:
    request = await begin(rig, make_request)
    rig.compiler.outcome.set_exception(error)
    await rig.settle()
    assert rig.host.requests == [request]
    ending = request.ending()
    assert ending is not None
    assert ending.error is not None
    assert (ending.error.code, ending.error.param) == (error.code, error.param)


async def test_it_enters_with_an_error_when_a_library_breaks(
    rig: Rig, make_request: MakeRequest, caplog: pytest.LogCaptureFixture
) -> None:
    request = await begin(rig, make_request)
    rig.compiler.outcome.set_exception(RuntimeError("what no library should throw"))
    await rig.settle()
    assert rig.host.requests == [request]
    assert request.prepared.refusal is not None
    assert request.prepared.refusal.code == "internal_error"
    assert "what no library should throw" in caplog.text


async def test_one_that_was_cancelled_meanwhile_never_enters(
    rig: Rig, make_request: MakeRequest
) -> None:
    request = await begin(rig, make_request)
    stream = rig.streams.get(request.key.gateway, request.key.stream)
    assert stream is not None
    rig.streams.end(stream, 0.0)
    rig.compiler.outcome.set_result(FakeGrammar())
    await rig.settle()
    assert rig.host.requests == []


async def test_without_grammars_it_is_refused_at_once(make_request: MakeRequest) -> None:
    rig = Rig(None)
    with pytest.raises(InvalidInput) as caught:
        await begin(rig, make_request)
    assert caught.value.param == "structured_outputs"
    assert rig.streams.num_live == 0
    await rig.preparation.stop()


def test_a_worker_that_sees_no_grammar_imports_no_library_for_them() -> None:
    code = (
        "import sys, tokenmesh.services.worker_svc.main\n"
        "assert not {'xgrammar', 'llguidance', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

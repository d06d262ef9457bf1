"""Compiling outside the worker: once for equal requests, bounded whatever is asked."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.grammars import EOS, VOCAB, json_schema
from tests.fakes.tokenizers import byte_level_bpe
from tokenmesh.engine.grammar.compile_job import BackendName
from tokenmesh.engine.grammar.matcher import Backend
from tokenmesh.services.worker_svc.grammar.compiler import GrammarCompiler
from tokenmesh.services.worker_svc.grammar.shared_grammars import SharedGrammars
from tokenmesh.shared.blobs import Blobs
from tokenmesh.shared.child_pool import ChildPool
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import InvalidInput, Overloaded
from tokenmesh.shared.ids import BlobKey
from tokenmesh.shared.messages.structured import CallForm, CallForms, Structured

LIMIT_S = 1.0
SLACK_S = 8.0
"""For starting processes on a machine that is busy."""

MakeCompiler = Callable[..., GrammarCompiler]

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level_bpe(tmp_path_factory.mktemp("compiler"))


@pytest.fixture
async def make(directory: Path) -> AsyncIterator[MakeCompiler]:
    made: list[GrammarCompiler] = []

    def compiler(shared: Blobs | None = None, **settings: Any) -> GrammarCompiler:
        limits = {
            "grammar_compile_s": LIMIT_S,
            "grammar_processes": 1,
            # its processes start in a tenth of the time
            "structured_outputs_backend": "guidance",
            **settings,
        }
        made.append(
            GrammarCompiler(
                directory / "tokenizer.json",
                VOCAB,
                frozenset({EOS}),
                WorkerSettings.model_validate(limits),
                shared,
            )
        )
        return made[-1]

    yield compiler
    for each in made:
        await each.stop()


def regex(text: str) -> Structured:
    return Structured(kind="regex", text=text, field="structured_outputs.regex")


async def test_equal_constraints_are_compiled_once_and_kept(make: MakeCompiler) -> None:
    compiler = make()
    asked = regex("[a-z]+")
    assert compiler.find(asked) is None
    later = Structured(kind="regex", text="[a-z]+", after=[[5]], field="elsewhere")
    first, *others = await asyncio.gather(*(compiler.compile(each) for each in (asked, later) * 3))
    assert all(other is first for other in others)
    assert compiler.find(later) is first
    assert await compiler.compile(asked) is first
    assert compiler.find(regex("[a-y]+")) is None


async def test_the_cache_forgets_what_was_not_used_for_longest(make: MakeCompiler) -> None:
    compiler = make(grammar_cache_bytes=3 * 70_000)
    for text in ("a", "b", "c", "d"):
        await compiler.compile(regex(text))
        compiler.find(regex("a"))
    assert [text for text in "abcd" if compiler.find(regex(text))] == ["a", "c", "d"]


async def test_a_refusal_names_the_field_and_each_library_that_refused(make: MakeCompiler) -> None:
    compiler = make(structured_outputs_backend="auto")
    with pytest.raises(InvalidInput) as caught:
        await compiler.compile(regex("("))
    assert caught.value.param == "structured_outputs.regex"
    for part in ("structured_outputs.regex: ", "xgrammar: ", "guidance: "):
        assert part in caught.value.message


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The shares of the jobs that any pool of processes was given."""
    shares: list[str] = []
    ask = ChildPool.ask

    async def noted(pool: ChildPool, job: bytes, share: str = "") -> bytes:
        shares.append(share)
        return await ask(pool, job, share)

    monkeypatch.setattr(ChildPool, "ask", noted)
    return shares


async def test_after_its_start_no_grammar_waits_for_a_process_or_a_library(
    make: MakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = make(structured_outputs_backend="auto", grammar_compile_s=0.3)
    may_start = asyncio.Event()
    started = compiler.start(may_start)
    assert compiler.is_starting
    may_start.set()
    await started
    assert not compiler.is_starting

    async def no_start(*_: object) -> None:
        raise AssertionError("something is started")

    monkeypatch.setattr(ChildPool, "_start", no_start)
    monkeypatch.setattr(GrammarCompiler, "_make_backend", no_start)
    # xgrammar is late, and the process that it was late in is needed again for what follows
    for text in ("(((a{1,100}){1,100}){1,100}){1,100}", "[a-z]+"):
        assert (await compiler.compile(regex(text))).start() is not None


async def test_a_grammar_in_redis_waits_for_no_process_and_for_its_own_library_only(
    make: MakeCompiler, blobs: Blobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = regex("moved [0-9]+")
    first = make(shared=blobs, structured_outputs_backend="auto")
    await first.compile(asked)
    await first.stop()
    other = make(shared=blobs, structured_outputs_backend="auto")
    make_backend, may_load = other._make_backend, threading.Event()
    find, is_late = SharedGrammars.find, [True]

    def slow_guidance(name: BackendName) -> Backend:
        if name == "guidance":
            may_load.wait(2 * SLACK_S)
        return make_backend(name)

    async def late(self: SharedGrammars, key: bytes) -> Any:
        return None if is_late and is_late.pop() else await find(self, key)

    monkeypatch.setattr(other, "_make_backend", slow_guidance)
    monkeypatch.setattr(SharedGrammars, "find", late)
    monkeypatch.setattr(other._pool, "start", lambda **_: asyncio.Event().wait())
    may_start = asyncio.Event()
    may_start.set()
    other.start(may_start)
    try:
        async with asyncio.timeout(SLACK_S):
            assert (await other.compile(asked)).start() is not None
        assert other.is_starting
    finally:
        may_load.set()


async def test_a_grammar_waits_for_the_process_that_is_started_already(
    make: MakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_starts = 0
    start = ChildPool._start

    async def counted(pool: ChildPool) -> Any:
        nonlocal num_starts
        num_starts += 1
        return await start(pool)

    monkeypatch.setattr(ChildPool, "_start", counted)
    monkeypatch.setattr(ChildPool, "start_others", lambda _pool: None)
    compiler = make(grammar_processes=2)
    may_start = asyncio.Event()
    compiler.start(may_start)
    asked = asyncio.create_task(compiler.compile(regex("early")))
    await asyncio.sleep(0)
    may_start.set()
    assert (await asked).start() is not None
    assert num_starts == 1


async def test_the_vocabulary_is_kept_by_no_more_processes_than_have_been_needed(
    make: MakeCompiler,
) -> None:
    compiler = make(structured_outputs_backend="auto", grammar_processes=3)
    may_start = asyncio.Event()
    may_start.set()
    await compiler.start(may_start)
    assert len(compiler._pool.processes) == 1
    assert compiler._tokens is None
    await compiler.compile(regex("[0-9]"))
    async with asyncio.timeout(SLACK_S):
        while len(compiler._pool.processes) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_libraries_that_do_not_load_are_not_waited_for(
    make: MakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ImportError("a library is missing")

    compiler = make()
    monkeypatch.setattr(GrammarCompiler, "_make_backend", broken)
    may_start = asyncio.Event()
    may_start.set()
    await compiler.start(may_start)
    assert not compiler.is_starting


async def test_a_worker_that_leaves_does_not_wait_to_start_its_compiler(make: MakeCompiler) -> None:
    compiler = make()
    compiler.start(asyncio.Event())
    async with asyncio.timeout(SLACK_S):
        await compiler.stop()
    assert not compiler.is_starting


def slow(number: int) -> Structured:
    """A grammar that takes seconds."""
    return Structured(kind="grammar", text=f"start: /a{{100000}}b{{{number}}}/")


@pytest.mark.parametrize("asked", [regex("("), slow(1)], ids=["wrong", "late"])
async def test_a_failed_grammar_is_not_compiled_again(
    make: MakeCompiler, jobs: list[str], asked: Structured
) -> None:
    compiler = make(grammar_compile_s=0.2)
    messages = set()
    for _ in range(3):
        with pytest.raises(InvalidInput) as caught:
            await compiler.compile(asked)
        messages.add(caught.value.message)
    assert len(messages) == 1
    assert len(jobs) == 1


async def test_one_that_was_late_is_tried_again_after_a_while(
    make: MakeCompiler, jobs: list[str]
) -> None:
    compiler = make(grammar_compile_s=0.1, grammar_retry_s=0.2)
    for _ in range(2):
        with pytest.raises(InvalidInput, match="longer"):
            await compiler.compile(slow(1))
        await asyncio.sleep(0.25)
    assert len(jobs) == 2


async def test_only_the_latest_failures_are_remembered(make: MakeCompiler, jobs: list[str]) -> None:
    compiler = make(grammar_failures=2)
    for text in ("(", "((", "(((", "("):
        with pytest.raises(InvalidInput):
            await compiler.compile(regex(text))
    assert len(jobs) == 4


async def test_another_tenant_does_not_wait_for_ones_bad_grammars(make: MakeCompiler) -> None:
    compiler = make(grammar_processes=2)
    await asyncio.gather(*(compiler.compile(regex(text)) for text in "xy"))
    bad = [asyncio.create_task(compiler.compile(slow(i), "greedy")) for i in range(4)]
    await asyncio.sleep(0.1)
    assert await compiler.compile(regex("[a-z]+"), "other") is not None
    assert not any(task.done() for task in bad)
    for task in bad:
        task.cancel()
    await asyncio.gather(*bad, return_exceptions=True)


async def test_another_worker_takes_what_the_first_one_compiled(
    make: MakeCompiler, jobs: list[str], blobs: Blobs
) -> None:
    asked = regex("shared [0-9]+")
    first = make(shared=blobs, structured_outputs_backend="auto")
    await first.compile(asked)
    await first.stop()
    other = make(shared=blobs, structured_outputs_backend="auto")
    grammar = await other.compile(asked)
    assert len(jobs) == 1
    assert type(grammar).__name__ == "XGrammar"
    # another library allows other tokens
    assert type(await make(shared=blobs).compile(asked)).__name__ == "GuidanceGrammar"


async def test_what_lies_damaged_or_foreign_in_redis_is_compiled_anew(
    make: MakeCompiler, jobs: list[str], blobs: Blobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_slot: Any = {"shared": blobs, "grammar_shared_slots": 1}
    stored: list[tuple[BlobKey, bytes]] = []
    put = Blobs.put

    async def noted(self: Blobs, data: bytes, key: BlobKey, ttl_s: int) -> BlobKey:
        stored.append((key, data))
        return await put(self, data, key, ttl_s)

    monkeypatch.setattr(Blobs, "put", noted)

    async def compile_anew(text: str) -> None:
        compiler = make(**one_slot)
        await compiler.compile(regex(text))
        await compiler.stop()

    for text in ("one slot", "for two", "one slot"):
        await compile_anew(text)
    assert len({key for key, _ in stored}) == 1
    assert len(jobs) == 3
    key, data = stored[-1]
    for damaged in (b"", data[:-1], data[:-1] + bytes([data[-1] ^ 1])):
        await put(blobs, damaged, key, 60)
        await compile_anew("one slot")
    assert len(jobs) == 6
    await compile_anew("one slot")
    assert len(jobs) == 6


async def test_who_stops_waiting_leaves_the_work_to_the_others(make: MakeCompiler) -> None:
    compiler = make()
    gone = asyncio.create_task(compiler.compile(regex("[a-z]{2}")))
    other = asyncio.create_task(compiler.compile(regex("[a-z]{2}")))
    await asyncio.sleep(0.01)
    gone.cancel()
    assert (await other).start() is not None


async def test_more_than_may_wait_are_refused(make: MakeCompiler) -> None:
    compiler = make(grammar_queue=2)
    results = await asyncio.gather(
        *(compiler.compile(regex(text)) for text in "abcdef"), return_exceptions=True
    )
    assert sum(isinstance(result, Overloaded) for result in results) == 3


def nested(depth: int) -> str:
    return '{"type":"array","items":' * depth + '{"type":"integer"}' + "}" * depth


def twice(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"anyOf": [schema, schema]}
    return schema


HOSTILE = {
    "huge nesting": Structured(kind="json", text=nested(5000)),
    "nested stars": regex("(a*)*b"),
    "alternations that double": regex("(a|a)*" * 20 + "b"),
    "a long repetition": regex("a{1,100000}"),
    "repetitions of repetitions": regex("((a{1,100}){1,100}){1,100}"),
    "a long class repetition": regex("[a-z]{1,4000}"),
    "nested groups": regex("(" * 5000 + "a" + ")" * 5000),
    "a look into the future": regex(".*a.{300}"),
    "10 MB of enum": json_schema({"enum": [f"{n:0100d}" for n in range(100_000)]}),
    "a circle of references": json_schema(
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    ),
    "a value without end": json_schema(
        {"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]}
    ),
    "a long string": json_schema({"type": "string", "maxLength": 1_000_000}),
    "many properties": json_schema(
        {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(3000)}}
    ),
    "unions that double": json_schema(twice(13)),
    "a rule that is itself": Structured(kind="grammar", text="root ::= root"),
    "ambiguous rules": Structured(kind="grammar", text='root ::= root root root | root root | "a"'),
    "empty rules": Structured(kind="grammar", text='root ::= (root root)? | "a"'),
    "nothing at all": Structured(kind="grammar", text=""),
    "no JSON": Structured(kind="structural_tag", text="{"),
}


async def endure(compiler: GrammarCompiler, names: Iterable[str]) -> None:
    """Each is done or refused in time, and the next one is served."""
    await compiler.compile(regex("warm"))
    for name in names:
        began = time.monotonic()
        reason = ""
        try:
            await compiler.compile(HOSTILE[name])
        except InvalidInput as error:
            reason = error.message
            assert "structured_outputs" in reason
        # each of two libraries has its time, and a new process may have to be started for each
        assert time.monotonic() - began < 2 * (LIMIT_S + SLACK_S), name
        assert len(reason) < 2000
    assert await compiler.compile(regex("ok")) is not None


async def test_hostile_constraints_are_done_or_refused_in_time(make: MakeCompiler) -> None:
    names = ("huge nesting", "nested stars", "unions that double", "a circle of references")
    await endure(make(grammar_memory_bytes=256 << 20, structured_outputs_backend="auto"), names)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_so_are_all_others(make: MakeCompiler) -> None:
    await endure(make(grammar_memory_bytes=256 << 20, structured_outputs_backend="auto"), HOSTILE)


@pytest.mark.parametrize(
    "asked",
    [
        json_schema({"type": "array", "items": {"type": "string", "maxLength": 3}}),
        json_schema({"type": "object"}, calls=CallForms(forms=[CallForm(begin="<f>", end="</f>")])),
        Structured(kind="grammar", text="start: /a/"),
    ],
    ids=["length of items", "schema and tools", "lark"],
)
async def test_what_xgrammar_does_not_follow_is_left_to_llguidance(
    make: MakeCompiler, caplog: pytest.LogCaptureFixture, asked: Structured
) -> None:
    compiler = make(structured_outputs_backend="xgrammar")
    with caplog.at_level("INFO"):
        await compiler.compile(regex("a"))
        assert "compiled by" not in caplog.text
        assert (await compiler.compile(asked)).start() is not None
    assert "a grammar is compiled by guidance; xgrammar: " in caplog.text


@pytest.fixture
def only_xgrammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing that it gives up be compiled by the other library."""
    monkeypatch.setattr(f"{GrammarCompiler.__module__}.backends_of", lambda _: ("xgrammar",))


@pytest.mark.usefixtures("only_xgrammar")
async def test_one_that_takes_too_long_is_given_up(make: MakeCompiler) -> None:
    compiler = make(structured_outputs_backend="xgrammar", grammar_compile_s=0.1)
    with pytest.raises(InvalidInput, match=r"longer than 0\.1 s"):
        await compiler.compile(regex("(((a{1,100}){1,100}){1,100}){1,100}"))


@pytest.mark.usefixtures("only_xgrammar")
async def test_one_that_takes_too_much_memory_is_given_up(make: MakeCompiler) -> None:
    compiler = make(structured_outputs_backend="xgrammar", grammar_memory_bytes=8 << 20)
    with pytest.raises(InvalidInput, match=r"memory|died|bad_alloc"):
        await compiler.compile(HOSTILE["unions that double"])


@pytest.mark.usefixtures("only_xgrammar")
async def test_one_that_compiles_to_too_much_is_refused(make: MakeCompiler) -> None:
    compiler = make(structured_outputs_backend="xgrammar", grammar_max_bytes=2000)
    schema = json_schema({"enum": [f"value {number}" for number in range(500)]})
    with pytest.raises(InvalidInput, match="more than 2000"):
        await compiler.compile(schema)
    assert json.loads(schema.text)["enum"]

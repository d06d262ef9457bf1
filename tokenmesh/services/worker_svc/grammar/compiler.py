"""GrammarCompiler: a request's constraint becomes a grammar, off the event loop and the engine.

Equal constraints of a tenant are compiled once, however many requests need them. Grammars, and the
errors of those that do not compile, are kept here, and in Redis for the other workers.
"""

import asyncio
import hashlib
import logging
from collections import OrderedDict, defaultdict
from pathlib import Path
from threading import Lock
from typing import Final, NamedTuple

import msgspec

from tokenmesh.engine.grammar.backends import backends_of, make_backend
from tokenmesh.engine.grammar.compile_job import (
    BackendName,
    Compiled,
    CompileJob,
    CompileSetup,
    NotCompiled,
    decode_answer,
    encode,
)
from tokenmesh.engine.grammar.matcher import Backend, CannotCompile, Grammar
from tokenmesh.engine.grammar.token_table import TokenTable, read_token_table
from tokenmesh.services.worker_svc.grammar.shared_grammars import SharedGrammars, vocabulary_of
from tokenmesh.shared.allocator import trim_heap
from tokenmesh.shared.blobs import Blobs
from tokenmesh.shared.child_pool import ChildDied, ChildLate, ChildLimits, ChildPool
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import InvalidInput, TokenMeshError
from tokenmesh.shared.messages.structured import Structured


class _Failure(NamedTuple):
    reason: str
    until_s: float | None
    """None: it will never compile."""


class Failures:
    """The latest of them, by key."""

    def __init__(self, size: int, retry_s: float) -> None:
        """retry_s: how long one that took too long is not tried again."""
        self._size = size
        self._retry_s = retry_s
        self._failure_by_key: OrderedDict[bytes, _Failure] = OrderedDict()

    def check(self, key: bytes) -> None:
        """Raises CannotCompile when this one has failed before."""
        failure = self._failure_by_key.get(key)
        if failure is None:
            return
        if failure.until_s is not None and failure.until_s <= monotonic_s():
            del self._failure_by_key[key]
            return
        self._failure_by_key.move_to_end(key)
        raise CannotCompile(failure.reason)

    def note(self, key: bytes, reason: str, is_final: bool) -> None:
        """One has failed; is_final: not of time, and so again next time."""
        until_s = None if is_final else monotonic_s() + self._retry_s
        self._failure_by_key[key] = _Failure(reason, until_s)
        self._failure_by_key.move_to_end(key)
        if len(self._failure_by_key) > self._size:
            self._failure_by_key.popitem(last=False)


logger = logging.getLogger(__name__)

_CHILD: Final = "tokenmesh.services.worker_svc.grammar.compile_child"


class GrammarCompiler:
    """For one tokenizer. `start` loads the libraries; without it the first grammar does."""

    def __init__(
        self,
        tokenizer_file: Path,
        vocab_size: int,
        eos_ids: frozenset[int],
        settings: WorkerSettings,
        blobs: Blobs | None = None,
    ) -> None:
        """vocab_size is the model's: ids past the tokenizer's are never allowed.

        blobs: where workers share what they compile; None: they do not.
        """
        self._tokenizer_file = tokenizer_file
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._settings = settings
        self._blobs = blobs
        self._shared: SharedGrammars | None = None
        self._backends: dict[BackendName, Backend] = {}
        self._tokens: TokenTable | None = None
        """Until all backends have read it: each has a copy of its own."""
        self._reading = Lock()
        self._loading: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._running: dict[tuple[str, bytes], asyncio.Task[Grammar]] = {}
        self._keeping: set[asyncio.Task[None]] = set()
        self._cache: OrderedDict[bytes, Grammar] = OrderedDict()
        self._cache_bytes = 0
        self._failures = Failures(settings.grammar_failures, settings.grammar_retry_s)
        self._pool = self._make_pool()
        self._starting: asyncio.Task[None] | None = None
        self._has_compiled = False

    @property
    def is_starting(self) -> bool:
        """Return whether the libraries are being loaded: a grammar would wait for them."""
        return self._starting is not None and not self._starting.done()

    def start(self, after: asyncio.Event) -> asyncio.Task[None]:
        """Load the libraries in the background, and start the processes once `after` is set.

        A stream that goes on here, its grammar in Redis, waits for the libraries only.
        """
        self._starting = asyncio.create_task(self._start(after))
        return self._starting

    async def _start(self, after: asyncio.Event) -> None:
        names = backends_of(self._settings.structured_outputs_backend)
        began_s = monotonic_s()
        loading = asyncio.gather(self._shared_grammars(), *map(self._backend, names))
        try:
            await after.wait()
            await asyncio.gather(self._pool.start(first_only=True), loading)
        # requests without a grammar do not need the library
        except (TokenMeshError, ImportError, OSError) as error:
            logger.warning("grammars cannot be compiled yet: %s", error)
            return
        finally:
            loading.cancel()
        logger.info("ready to compile grammars after %.1f s", monotonic_s() - began_s)

    def find(self, structured: Structured) -> Grammar | None:
        """The grammar, when it is there already."""
        key = _key_of(structured)
        grammar = self._cache.get(key)
        if grammar is not None:
            self._cache.move_to_end(key)
        return grammar

    async def compile(self, structured: Structured, share: str = "") -> Grammar:
        """The grammar. Raises InvalidInput that says why there is none, Overloaded, Unavailable.

        share: who asks; several of them take turns. Who stops waiting does not stop the
        compilation: others may wait for it.
        """
        found = self.find(structured)
        if found is not None:
            return found
        key = _key_of(structured)
        try:
            self._failures.check(key)
            task = self._running.get((share, key))
            if task is None:
                task = asyncio.create_task(self._compile(key, structured, share))
                self._running[share, key] = task
                task.add_done_callback(lambda done: self._note(share, key, done))
            return await asyncio.shield(task)
        except CannotCompile as error:
            field = structured.field
            raise InvalidInput(f"{field}: {error.message}", param=field) from error

    async def stop(self) -> None:
        """End the processes and all compilations; what is compiled is still shared."""
        tasks: list[asyncio.Task[Grammar] | asyncio.Task[None]] = [*self._running.values()]
        if self._starting is not None:
            tasks.append(self._starting)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._keeping, return_exceptions=True)
        await self._pool.stop()

    def _make_pool(self) -> ChildPool:
        settings = self._settings
        setup = CompileSetup(
            tokenizer_file=str(self._tokenizer_file),
            vocab_size=self._vocab_size,
            eos_ids=sorted(self._eos_ids),
            time_s=settings.grammar_compile_s,
            memory_bytes=settings.grammar_memory_bytes,
            grammar_bytes=settings.grammar_max_bytes,
            backends=list(backends_of(settings.structured_outputs_backend)),
        )
        limits = ChildLimits(
            settings.grammar_processes, settings.grammar_queue, settings.grammar_compile_s
        )
        arguments = (msgspec.json.encode(setup).decode(),)
        hello = encode(CompileJob(backend="guidance", structured=None))
        return ChildPool("grammars to be compiled", _CHILD, arguments, limits, hello)

    async def _compile(self, key: bytes, structured: Structured, share: str) -> Grammar:
        shared = await self._shared_grammars()
        found = await self._find_shared(shared, key) if shared is not None else None
        if found is not None:
            return await self._load(*found)
        name, data = await self._compile_in_child(key, structured, share)
        if shared is not None:
            task = asyncio.create_task(shared.keep(key, name, data))
            self._keeping.add(task)
            task.add_done_callback(self._keeping.discard)
        return await self._load(name, data)

    async def _find_shared(
        self, shared: SharedGrammars, key: bytes
    ) -> tuple[BackendName, bytes] | None:
        """Asks again while no process is there yet: Redis may be late, or another worker's is."""
        while (found := await shared.find(key)) is None and self.is_starting:
            assert self._starting is not None
            await asyncio.wait({self._starting}, timeout=self._settings.grammar_shared_wait_s)
        return found

    async def _compile_in_child(
        self, key: bytes, structured: Structured, share: str
    ) -> tuple[BackendName, bytes]:
        if self._starting is not None:
            # a second process would be started while the first one starts
            await asyncio.wait({self._starting})
        reasons: list[str] = []
        is_final = True
        plain = msgspec.structs.replace(structured, after=[], field="")
        for name in backends_of(self._settings.structured_outputs_backend):
            job = encode(CompileJob(name, plain))
            try:
                answer = decode_answer(await self._pool.ask(job, share))
            except (ChildLate, ChildDied) as error:
                logger.warning("a grammar was given up in %s: %s", name, error.message)
                answer = NotCompiled(error.message)
                is_final = False
            if not self._has_compiled:
                # a worker that never compiles needs no others, which hold the vocabulary each
                self._has_compiled = True
                self._pool.start_others()
            if isinstance(answer, Compiled):
                if reasons and self._settings.structured_outputs_backend == "xgrammar":
                    logger.info("a grammar is compiled by %s; %s", name, reasons[0])
                return name, answer.data
            reasons.append(f"{name}: {answer.reason}")
        self._failures.note(key, "; ".join(reasons), is_final)
        raise CannotCompile("; ".join(reasons))

    async def _load(self, name: BackendName, data: bytes) -> Grammar:
        backend = await self._backend(name)
        return await asyncio.to_thread(backend.load, data)

    async def _shared_grammars(self) -> SharedGrammars | None:
        if self._blobs is None:
            return None
        async with self._loading["shared"]:
            if self._shared is None:
                vocabulary = await asyncio.to_thread(
                    vocabulary_of,
                    self._tokenizer_file,
                    self._vocab_size,
                    self._eos_ids,
                    self._settings.structured_outputs_backend,
                )
                self._shared = SharedGrammars(self._blobs, vocabulary, self._settings)
        return self._shared

    async def _backend(self, name: BackendName) -> Backend:
        """Return what loads grammars here; a large vocabulary takes a second, once."""
        async with self._loading[name]:
            if name not in self._backends:
                self._backends[name] = await asyncio.to_thread(self._make_backend, name)
                if len(self._backends) == len(
                    backends_of(self._settings.structured_outputs_backend)
                ):
                    self._tokens = None
                    await asyncio.to_thread(trim_heap)
        return self._backends[name]

    def _make_backend(self, name: BackendName) -> Backend:
        with self._reading:
            if self._tokens is None:
                self._tokens = read_token_table(
                    self._tokenizer_file, self._vocab_size, self._eos_ids
                )
            tokens = self._tokens
        return make_backend(name, tokens)

    def _note(self, share: str, key: bytes, task: "asyncio.Task[Grammar]") -> None:
        del self._running[share, key]
        if task.cancelled() or task.exception() is not None or key in self._cache:
            return
        grammar = task.result()
        self._cache[key] = grammar
        self._cache_bytes += grammar.num_bytes
        while self._cache_bytes > self._settings.grammar_cache_bytes:
            _, oldest = self._cache.popitem(last=False)
            self._cache_bytes -= oldest.num_bytes


def _key_of(structured: Structured) -> bytes:
    """Equal for constraints that differ only in when they begin and what the client calls them."""
    plain = msgspec.structs.replace(structured, after=[], field="")
    return hashlib.blake2b(msgspec.msgpack.encode(plain), digest_size=32).digest()

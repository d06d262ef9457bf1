"""The compiling process: reads jobs from stdin, writes answers to stdout, until stdin ends.

Its bounds hold whatever a library does: the kernel ends it when the alarm of a job goes off, and
refuses memory. `python -m ...compile_child <CompileSetup as JSON>`.
"""

import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from tokenmesh.engine.grammar.backends import make_backend
from tokenmesh.engine.grammar.compile_job import (
    CompileAnswer,
    Compiled,
    CompileSetup,
    NotCompiled,
    decode_job,
    encode,
)
from tokenmesh.engine.grammar.matcher import (
    Backend,
    CannotCompile,
    GrammarFailed,
    num_words,
)
from tokenmesh.engine.grammar.token_table import TokenTable, read_token_table
from tokenmesh.shared.allocator import trim_heap
from tokenmesh.shared.child_pool import serve
from tokenmesh.shared.messages.structured import Structured

TRIAL_TOKENS: Final = 32
"""Steps that a new grammar is followed, so that one that explodes does so in this process."""


class Bench:
    """The backends of one process."""

    def __init__(self, setup: CompileSetup, tokens: TokenTable) -> None:
        self._setup = setup
        self._num_tokens = len(tokens.tokens)
        self._backends = {
            name: make_backend(name, tokens, compiles_only=True) for name in setup.backends
        }

    def prepare(self, data: bytes) -> Callable[[], bytes]:
        """A job, ready to run."""
        job = decode_job(data)
        if job.structured is None:
            return lambda: encode(Compiled(b""))
        backend, structured = self._backends[job.backend], job.structured
        _limit_memory(_data_bytes() + self._setup.memory_bytes)
        return lambda: encode(self._answer(backend, structured))

    def _answer(self, backend: Backend, structured: Structured) -> CompileAnswer:
        try:
            data = backend.compile(structured)
            if len(data) > self._setup.grammar_bytes:
                raise CannotCompile(
                    f"it compiles to {len(data)} bytes, more than {self._setup.grammar_bytes} "
                    "(worker.grammar_max_bytes)"
                )
            self._try_out(backend, data)
        except (CannotCompile, GrammarFailed) as error:
            return NotCompiled(error.message)
        except (MemoryError, RecursionError):
            return NotCompiled("it needs more memory than compiling may take")
        return Compiled(data)

    def _try_out(self, backend: Backend, data: bytes) -> None:
        """Follow the grammar for a while. Raises CannotCompile when it allows nothing."""
        matcher = backend.load(data).start()
        masks = np.zeros((1, num_words(self._num_tokens)), dtype=np.int32)
        for position in range(TRIAL_TOKENS):
            matcher.fill(masks, 0)
            allowed = np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little"))
            if not len(allowed):
                raise CannotCompile("it allows no text at all")
            matcher.accept(int(allowed[(7 * position) % len(allowed)]))
            if matcher.is_terminated():
                return


def _data_bytes() -> int:
    """Memory that counts towards the limit before a job."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    return 0


def _limit_memory(num_bytes: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, hard))


def main(argument: str) -> None:
    """Serve until stdin ends."""
    setup = msgspec.json.decode(argument, type=CompileSetup)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    eos_ids = frozenset(setup.eos_ids)
    bench = Bench(setup, read_token_table(Path(setup.tokenizer_file), setup.vocab_size, eos_ids))
    trim_heap()
    # libraries take seconds to load: ending a job must not cost that again
    serve(sys.stdin.buffer, sys.stdout.buffer, setup.time_s, bench.prepare, forks=True)


if __name__ == "__main__":
    main(sys.argv[1])

"""Prints the files of tests to run: all, or those that a change can reach, `CHANGED=origin/main`.

Those of the engine and its kernels that need no service are left out where they have passed with
the same inputs: `make test-engine` runs them and records a hash of all that they depend on. That is
what they import, directly or through other modules, the files that these modules may read, the
versions of libraries and of Python (see `changed_tests.py`), and what the processor can do, since
the C kernels have several ways to compute.
"""

import hashlib
import platform
import re
import sys
from collections.abc import Iterable, Set
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.changed_tests import (
    ALL,
    ROOT,
    Graph,
    all_files,
    chosen_files,
    name_of,
    sources,
    tests_among,
)

_RECORD: Final = ".ci/engine_inputs.sha256"
ALWAYS: Final = ("pyproject.toml", "tests/repeated.txt", "tests/used_files.py", "uv.lock")
"""Versions, and how tests run. What collects and marks them is imported by their conftest, but for
what notes the files that they use."""
_FOLDERS: Final = tuple(
    f"tests/{each}/" for each in ("engine", "kernels", "ops", "unit/speculate", "unit/worker_svc")
)
_BEGUN: Final = "digest"
"""A file with the hash before the tests run."""
_OTHERS: Final = "tokenmesh.services."
_COMPUTES: Final = re.compile("avx|amx|fma|f16c|bmi|sse|asimd|sve")


class EngineTests:
    """Tests of the engine and its kernels by themselves."""

    def __init__(self, graph: Graph, files: Iterable[str]) -> None:
        """`files`: all of the repository."""
        self.files: list[str] = []
        """Their paths."""
        needed: set[str] = set()
        known = list(files)
        for path in tests_among(known):
            needs = graph.needs(name_of(path)) if path.startswith(_FOLDERS) else {ALL}
            if not _is_open(needs):
                self.files.append(path)
                needed |= needs
        self.inputs = sorted(path for path in known if _is_input(graph, path, needed))
        """The files that they depend on."""

    def digest(self, root: Path) -> str:
        """The hash of the names and contents of all inputs, of Python's version and processor."""
        found = hashlib.sha256(repr((sys.version_info[:3], _processor())).encode())
        for path in self.inputs:
            content = hashlib.sha256((root / path).read_bytes()).hexdigest()
            found.update(f"{content} {path}\n".encode())
        return found.hexdigest()


def _processor() -> list[str]:
    """Its kind, and its instructions for vectors and matrices where Linux lists them: the rest of
    them differs between machines of one kind and changes no number."""
    listed = Path("/proc/cpuinfo")
    lines = listed.read_text().splitlines() if listed.exists() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return [platform.machine(), *sorted(filter(_COMPUTES.match, flags.split()))]


def _is_open(needs: Set[str]) -> bool:
    return ALL in needs or any(each.startswith(_OTHERS) for each in needs)


def _is_input(graph: Graph, path: str, needed: Set[str]) -> bool:
    if path in ALWAYS or path == _RECORD:
        return path in ALWAYS
    owners = graph.owners(path)
    # what has no owner may be read by any test
    return not owners or not needed.isdisjoint(owners)


def _record(engine: EngineTests, folder: Path) -> None:
    """Record that they have passed, unless an input has changed meanwhile or they used a file that
    is none; the processes that ran them have written the names of those to this folder."""
    digest = engine.digest(ROOT)
    if (folder / _BEGUN).read_text() != digest:
        raise SystemExit("files have changed while the tests ran")
    lists = [each for each in folder.iterdir() if each.name != _BEGUN]
    used = {line for each in lists for line in each.read_text().splitlines()}
    if not used:
        raise SystemExit("no test has run")
    if unknown := sorted(used.intersection(all_files()).difference(engine.inputs)):
        raise SystemExit(f"tests of the engine use what they do not name: {', '.join(unknown)}")
    (ROOT / _RECORD).write_text(f"{digest}\n")


def main() -> None:
    """`COMMIT`: those that a change since then reaches. `--engine FOLDER`: those of the engine.
    `--record FOLDER`: they have passed."""
    found = sources()
    graph, tests = Graph(found), tests_among(found)
    engine = EngineTests(graph, all_files())
    match sys.argv[1:]:
        case ["--record", folder]:
            _record(engine, Path(folder))
            return
        case ["--engine", folder]:
            (Path(folder) / _BEGUN).write_text(engine.digest(ROOT))
            print("\n".join(engine.files))
            return
        case [commit]:
            chosen = chosen_files(graph, tests, commit)
        case _:
            chosen = tests
    record = ROOT / _RECORD
    if record.exists() and record.read_text().strip() == engine.digest(ROOT):
        chosen = [each for each in chosen if each not in engine.files]
        print(f"{len(engine.files)} files have passed `make test-engine`", file=sys.stderr)
    print(f"{len(chosen)} of {len(tests)} files of tests", file=sys.stderr)
    print("tests" if len(chosen) == len(tests) else "\n".join(chosen))


if __name__ == "__main__":
    main()

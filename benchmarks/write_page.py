"""docs/benchmarks.md from benchmarks/results/: `python -m benchmarks.write_page`.

A file that is not there has no section. A test fails while the page does not match the files.
"""

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.bench_embeddings import EmbeddingsResult
from benchmarks.bench_real_models import RealModelsResult
from benchmarks.bench_startup import StartupResult
from benchmarks.engine_results import BoundResult, EngineResult, SchedulerResult
from benchmarks.index_results import IndexResult
from benchmarks.ops.results import Sweep
from benchmarks.page.embeddings import embeddings_section
from benchmarks.page.engine import (
    bound_section,
    decode_section,
    nano_section,
    ops_section,
    scheduler_section,
    startup_section,
)
from benchmarks.page.index import index_section
from benchmarks.page.mesh import (
    chaos_section,
    fairness_section,
    guided_chaos_section,
    prefill_apart_section,
    recovery_section,
    replay_section,
)
from benchmarks.page.peers import mesh_peers_section, overhead_section, peers_section
from benchmarks.page.real_models import real_models_section
from benchmarks.peers.results import PeersResult
from benchmarks.serve.results import ROOT

PAGE: Final = ROOT / "docs" / "benchmarks.md"
RESULTS: Final = ROOT / "benchmarks" / "results"

SECTIONS: Final[tuple[tuple[str, Any, Callable[[Any], Iterator[str]]], ...]] = (
    ("peers.json", PeersResult, peers_section),
    ("real_models.json", RealModelsResult, real_models_section),
    ("mesh_peers.json", dict[str, Any], mesh_peers_section),
    ("overhead.json", PeersResult, overhead_section),
    ("embeddings.json", EmbeddingsResult, embeddings_section),
    ("engine.json", EngineResult, decode_section),
    ("nano.json", EngineResult, nano_section),
    ("bound.json", BoundResult, bound_section),
    ("startup.json", StartupResult, startup_section),
    ("scheduler.json", SchedulerResult, scheduler_section),
    ("index.json", IndexResult, index_section),
    ("replay_conversation.json", dict[str, Any], replay_section),
    ("recovery.json", dict[str, Any], recovery_section),
    ("chaos.json", dict[str, Any], chaos_section),
    ("chaos_torch.json", dict[str, Any], guided_chaos_section),
    ("fairness.json", dict[str, Any], fairness_section),
    ("prefill_apart.json", dict[str, Any], prefill_apart_section),
    ("ops_cpu.json", Sweep, ops_section),
    ("ops_cuda.json", Sweep, ops_section),
)
RUN_BY_HAND: Final = frozenset(
    {
        *("replay_conversation.json", "recovery.json", "fairness.json", "mesh_peers.json"),
        *("chaos.json", "chaos_torch.json", "ops_cuda.json", "embeddings.json"),
        *("real_models.json", "prefill_apart.json"),
    }
)
"""Results that `make bench` leaves out: faults that take long, a trace and models that are not
shipped, a GPU."""
_WIDTH: Final = 120
_INTRODUCTION: Final = """\
<!-- Written by benchmarks/write_page.py from benchmarks/results/; edit the code instead. -->
# Benchmarks

Measured by the programs in [benchmarks/](../benchmarks/README.md); `make bench` runs most of them
on a quiet machine, those of faults, tenants and traces run one by one. What is compared ran side by
side in one run, unless a line says that it is quoted. What was tried and why numbers moved is in
the [lab notebook](log.md)."""


def page(results: Path) -> str:
    """The text.

    Raises msgspec.ValidationError or KeyError for a file that is not what its program writes.
    """
    lines = [_INTRODUCTION]
    for name, kind, section in SECTIONS:
        path = results / name
        if path.exists():
            found = section(msgspec.json.decode(path.read_bytes(), type=kind))
            lines += ["", *(_wrapped(line) for line in found)]
    return "\n".join(lines) + "\n"


def _wrapped(line: str) -> str:
    """The line as lines of a page; rows of tables stay as they are."""
    if line.startswith("|"):
        return line
    return textwrap.fill(line, _WIDTH, break_long_words=False, break_on_hyphens=False)


def main() -> int:
    """Write the page."""
    PAGE.write_text(page(RESULTS), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Holds a run of bench_peers against its bars."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from benchmarks.peers.quoted import QUOTED
from benchmarks.peers.results import ModelResult

BOUND_SHARE: Final = 0.85


@dataclass(frozen=True, slots=True)
class Bar:
    """TokenMesh over HTTP against the best of some peers."""

    name: str
    peers: tuple[str, ...]
    streams: int
    factor: float


BARS: Final = (
    Bar("transformers.generate", ("generate",), 1, 2.5),
    Bar("transformers.generate", ("generate",), 8, 1.8),
    Bar("vLLM's CPU build", ("vllm", "vllm-all-cores"), 1, 1.5),
    Bar("vLLM's CPU build", ("vllm", "vllm-all-cores"), 8, 1.5),
    Bar("vLLM's CPU build", ("vllm", "vllm-all-cores"), 32, 1.3),
    Bar("llama.cpp", ("llama.cpp",), 1, 1.0),
    Bar("llama.cpp", ("llama.cpp",), 8, 1.0),
    Bar("llama.cpp", ("llama.cpp",), 32, 1.0),
)


def rows(model: ModelResult) -> Iterator[tuple[str, str, str, str]]:
    """(against what, the bar, what was reached, whether it holds)."""
    for bar in BARS:
        mesh = model.best(bar.streams, "mesh")
        peer, is_quoted = _strongest(model, bar)
        if mesh is None or peer is None:
            continue
        ratio = mesh.tokens_per_s / peer
        name = f"{bar.name}{' (quoted)' * is_quoted}, {_streams(bar.streams)}"
        yield name, f"{bar.factor:.1f}x", f"{ratio:.2f}x", _held(ratio >= bar.factor)
    share = model.bound_share
    if share is not None:
        name = "bandwidth bound, decode of 1 stream in-process"
        yield name, f"{BOUND_SHARE:.0%}", f"{share:.0%}", _held(share >= BOUND_SHARE)


def _strongest(model: ModelResult, bar: Bar) -> tuple[float | None, bool]:
    """Tokens a second of the best of the bar's peers; from another run where it must be."""
    measured = [model.best(bar.streams, peer) for peer in bar.peers]
    speeds = [sample.tokens_per_s for sample in measured if sample is not None]
    if speeds:
        return max(speeds), False
    quoted = QUOTED.get(model.name, {}).get(bar.peers[0], {}).get(bar.streams)
    return (quoted[1], True) if quoted else (None, False)


def _held(is_held: bool) -> str:
    return "yes" if is_held else "**no**"


def _streams(count: int) -> str:
    return "1 stream" if count == 1 else f"{count} streams"

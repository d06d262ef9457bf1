"""Texts a second of /v1/embeddings, over HTTP, beside sentence-transformers in its own process.

    python -m benchmarks.bench_embeddings --checkpoint DIR --out benchmarks/results/embeddings.json

Both have the same checkpoint and as many threads, and take turns, so that load on the machine is
shared. Without sentence-transformers the mesh is measured alone. The cosine distance compares the
two answers to each text.
"""

import argparse
import asyncio
import importlib
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Final

import msgspec

from benchmarks.serve.own_server import own_server
from tokenmesh.cli.bench.client import Target

_TEXT: Final = (
    "the mesh serves many models and each worker runs one of them while gateways answer requests "
    "over http a scheduler chooses where a prompt is computed and blocks of keys and values are "
    "shared between streams that begin alike"
)
WORDS: Final = _TEXT.split()
CASES: Final = {"short": (4, 20), "long": (400, 400)}
"""Words of a text, at least and at most; the long ones are cut to the model's length."""
COUNTS: Final = (32, 256)
_MODEL: Final = "embedder"


class Case(msgspec.Struct):
    """One kind of request."""

    texts: int
    kind: str
    """A key of CASES."""
    mesh_s: float
    """The fastest of all rounds."""
    peer_s: float = 0.0
    """The same of sentence-transformers; 0: not measured."""
    distance: float = 0.0
    """The largest cosine distance of the two answers to a text."""

    @property
    def ratio(self) -> float:
        """How many times as many texts a second the mesh embeds."""
        return self.peer_s / self.mesh_s


def texts_of(kind: str, count: int) -> list[str]:
    """The same ones in every run."""
    chosen = random.Random(count)
    low, high = CASES[kind]
    return [" ".join(chosen.choices(WORDS, k=chosen.randint(low, high))) for _ in range(count)]


class Peer:
    """sentence-transformers in a child process."""

    def __init__(self, checkpoint: Path, threads: int) -> None:
        command = [sys.executable, "-m", "benchmarks.bench_embeddings", "--child"]
        command += ["--checkpoint", str(checkpoint), "--threads", str(threads)]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.is_there = self._read() == "ready"

    def embed(self, texts: Sequence[str]) -> tuple[float, list[list[float]]]:
        """Seconds, and the embeddings."""
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(texts).encode() + b"\n")
        self._child.stdin.flush()
        seconds, vectors = json.loads(self._read())
        return seconds, vectors

    def close(self) -> None:
        """End the process."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait(timeout=30)

    def _read(self) -> str:
        assert self._child.stdout is not None
        return self._child.stdout.readline().decode().strip()


def answer_parent(checkpoint: Path, threads: int, lines: IO[str]) -> None:
    """The child: a list of texts a line in, seconds and embeddings out."""
    try:
        library = importlib.import_module("sentence_transformers")
    except ImportError:
        print("missing", flush=True)
        return
    import torch

    torch.set_num_threads(threads)
    model = library.SentenceTransformer(str(checkpoint), device="cpu")
    print("ready", flush=True)
    for line in lines:
        began_s = time.perf_counter()
        found = model.encode(json.loads(line), show_progress_bar=False)
        seconds = time.perf_counter() - began_s
        print(json.dumps([seconds, found.tolist()]), flush=True)


async def ask_mesh(server: Target, texts: Sequence[str]) -> tuple[float, list[list[float]]]:
    """Seconds of one request, and the embeddings."""
    began_s = time.perf_counter()
    body = {"model": _MODEL, "input": list(texts), "truncate_prompt_tokens": -1}
    answer = await server.ask("POST", "/v1/embeddings", body)
    seconds = time.perf_counter() - began_s
    return seconds, [each["embedding"] for each in json.loads(answer)["data"]]


def distance(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """1 - cosine."""
    product = sum(a * b for a, b in zip(ours, theirs, strict=True))
    return 1 - product / math.sqrt(sum(a * a for a in ours) * sum(b * b for b in theirs))


async def measure(url: str, peer: Peer, rounds: int) -> list[Case]:
    """Every case, the two in turns."""
    server, cases = Target(url, None), []
    for count in COUNTS:
        for kind in CASES:
            texts = texts_of(kind, count)
            case = Case(count, kind, math.inf, math.inf if peer.is_there else 0.0)
            for _ in range(rounds):
                seconds, ours = await ask_mesh(server, texts)
                case.mesh_s = min(case.mesh_s, seconds)
                if peer.is_there:
                    seconds, theirs = await asyncio.to_thread(peer.embed, texts)
                    case.peer_s = min(case.peer_s, seconds)
                    pairs = zip(ours, theirs, strict=True)
                    case.distance = max(case.distance, *(distance(*pair) for pair in pairs))
            cases.append(case)
    return cases


def report(cases: Sequence[Case]) -> str:
    """The table that is printed."""
    lines = []
    for case in cases:
        line = f"{case.texts:4d} {case.kind:<6} {case.texts / case.mesh_s:8.1f} texts/s"
        if case.peer_s:
            line += (
                f", sentence-transformers {case.texts / case.peer_s:8.1f}, ratio {case.ratio:.2f}, "
                f"cosine distance {case.distance:.1e}"
            )
        lines.append(line)
    return "\n".join(lines)


async def run(checkpoint: Path, threads: int, rounds: int, dtype: str, url: str) -> list[Case]:
    """Measure a server that runs, or one of its own."""
    peer = Peer(checkpoint, threads)
    try:
        if url:
            return await measure(url, peer, rounds)
        command = [sys.executable, "-m", "tokenmesh", "up", str(checkpoint), "--dtype", dtype]
        command += ["--served-model-name", _MODEL]
        environment = {**os.environ, "TOKENMESH_WORKER__CPU_THREADS": str(threads)}
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "mesh.log"
            async with own_server(command, "/health", environment, log) as server:
                return await measure(server.url, peer, rounds)
    finally:
        peer.close()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--url", default="", help="a server that runs, instead of one of its own")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        answer_parent(options.checkpoint, options.threads, sys.stdin)
        return
    cases = asyncio.run(
        run(options.checkpoint, options.threads, options.rounds, options.dtype, options.url)
    )
    print(report(cases))
    if options.out is not None:
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(cases)))


if __name__ == "__main__":
    main()

"""Texts a second of /v1/embeddings over HTTP, compared with sentence-transformers in its own
process and Infinity over HTTP.

    python -m benchmarks.bench_embeddings --checkpoint DIR --out benchmarks/results/embeddings.json

All have the same checkpoint in float32 and as many threads, and take turns, so that load on the
machine is shared. `--infinity` is the command `infinity_emb` of another environment. What is not
installed is left out. The cosine distance compares the two answers to each text.
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
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Final

import msgspec

from benchmarks.serve.own_server import own_server
from benchmarks.serve.results import environment, write_json
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
_MESH_PATH: Final = "/v1/embeddings"


class Case(msgspec.Struct):
    """One kind of request; seconds are those of the fastest round, 0: not measured."""

    texts: int
    kind: str
    """A key of CASES."""
    mesh_s: float = 0.0
    sentence_transformers_s: float = 0.0
    infinity_s: float = 0.0
    distance: float = 0.0
    """The largest cosine distance of the mesh's and sentence-transformers' answers to a text."""

    @property
    def ratio(self) -> float:
        """The texts a second of the mesh, as a multiple of sentence-transformers'."""
        return self.sentence_transformers_s / self.mesh_s


class EmbeddingsResult(msgspec.Struct):
    """A run, as it is saved."""

    config: dict[str, object]
    environment: dict[str, object]
    load_average_end: float
    cases: list[Case]


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


async def ask(server: Target, path: str, texts: Sequence[str]) -> tuple[float, list[list[float]]]:
    """Seconds of one request, and the embeddings."""
    body: dict[str, object] = {"model": _MODEL, "input": list(texts)}
    if path == _MESH_PATH:
        body["truncate_prompt_tokens"] = -1
    began_s = time.perf_counter()
    answer = await server.fetch("POST", path, body)
    seconds = time.perf_counter() - began_s
    return seconds, [each["embedding"] for each in json.loads(answer)["data"]]


def distance(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """1 - cosine."""
    product = sum(a * b for a, b in zip(ours, theirs, strict=True))
    return 1 - product / math.sqrt(sum(a * a for a in ours) * sum(b * b for b in theirs))


@dataclass
class Servers:
    """The servers that are measured."""

    mesh: Target
    infinity: Target | None
    peer: Peer


async def measure(servers: Servers, rounds: int) -> list[Case]:
    """Every case, all in turns."""
    cases = []
    for count in COUNTS:
        for kind in CASES:
            case, texts = Case(count, kind), texts_of(kind, count)
            for _ in range(rounds):
                await _round(servers, case, texts)
            cases.append(case)
    return cases


async def _round(servers: Servers, case: Case, texts: Sequence[str]) -> None:
    seconds, ours = await ask(servers.mesh, _MESH_PATH, texts)
    case.mesh_s = _faster(case.mesh_s, seconds)
    if servers.peer.is_there:
        seconds, theirs = await asyncio.to_thread(servers.peer.embed, texts)
        case.sentence_transformers_s = _faster(case.sentence_transformers_s, seconds)
        pairs = zip(ours, theirs, strict=True)
        case.distance = max(case.distance, *(distance(*pair) for pair in pairs))
    if servers.infinity is not None:
        seconds, _ = await ask(servers.infinity, "/embeddings", texts)
        case.infinity_s = _faster(case.infinity_s, seconds)


def _faster(before: float, seconds: float) -> float:
    return min(before, seconds) if before else seconds


def report(cases: Sequence[Case]) -> str:
    """The table that is printed."""
    lines = []
    for case in cases:
        line = f"{case.texts:4d} {case.kind:<6} {case.texts / case.mesh_s:8.1f} texts/s"
        if case.sentence_transformers_s:
            line += (
                f", sentence-transformers {case.texts / case.sentence_transformers_s:8.1f}, "
                f"ratio {case.ratio:.2f}, cosine distance {case.distance:.1e}"
            )
        if case.infinity_s:
            line += f", Infinity over HTTP {case.texts / case.infinity_s:8.1f}"
        lines.append(line)
    return "\n".join(lines)


async def run(options: argparse.Namespace) -> list[Case]:
    """Start the servers and measure."""
    peer = Peer(options.checkpoint, options.threads)
    threads = str(options.threads)
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "tokenmesh", "up", str(options.checkpoint)]
    command += ["--dtype", "float32", "--served-model-name", _MODEL]
    async with AsyncExitStack() as stack:
        stack.callback(peer.close)
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        own = offline | {"TOKENMESH_WORKER__CPU_THREADS": threads}
        server = own_server(command, "/health", own, logs / "mesh.log")
        mesh, infinity = await stack.enter_async_context(server), None
        if options.infinity is not None:
            command = [str(options.infinity), "v2", "--model-id", str(options.checkpoint)]
            command += ["--served-model-name", _MODEL, "--engine", "torch", "--device", "cpu"]
            command += ["--dtype", "float32", "--no-bettertransformer", "--host", "127.0.0.1"]
            own = offline | {"OMP_NUM_THREADS": threads, "DO_NOT_TRACK": "1"}
            server = own_server(command, "/health", own, logs / "infinity.log")
            infinity = Target((await stack.enter_async_context(server)).url, None)
        return await measure(Servers(Target(mesh.url, None), infinity, peer), options.rounds)


def versions(options: argparse.Namespace) -> dict[str, object]:
    """Return versions of the libraries in the mesh."""
    found: dict[str, object] = {}
    for name in ("sentence-transformers", "torch", "transformers"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    if options.infinity is not None:
        code = "from importlib.metadata import version as v; print(v('infinity-emb'), v('torch'))"
        command = [str(options.infinity.parent / "python"), "-c", code]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found["infinity-emb"], found["torch of Infinity"] = printed.split()
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--infinity", type=Path, help="the command infinity_emb")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        answer_parent(options.checkpoint, options.threads, sys.stdin)
        return
    at_start = environment()
    cases = asyncio.run(run(options))
    print(report(cases))
    if options.out is not None:
        config: dict[str, object] = {
            "model": options.checkpoint.name,
            "threads": options.threads,
            "rounds": options.rounds,
        }
        config |= versions(options)
        write_json(options.out, EmbeddingsResult(config, at_start, os.getloadavg()[0], cases))


if __name__ == "__main__":
    main()

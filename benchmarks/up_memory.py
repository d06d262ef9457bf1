"""Measures a whole mesh: `tokenmesh up` of one file, ten answers, memory by process.

Memory is the proportional share (PSS): pages that several processes map count once. Bytes are
decimal. Other processes that map the same libraries lower the share: run it alone.
"""

import sys
from pathlib import Path
from typing import Final

import httpx
import msgspec

from tokenmesh.cli.embedded.ports import LOOPBACK, free_port
from tokenmesh.cli.run import is_ready, serving
from tokenmesh.shared.clock import monotonic_s

ANSWERS: Final = 10
_TOKENS: Final = 64


class UpResult(msgspec.Struct):
    """One round."""

    ready_s: float
    pss_bytes: dict[str, int]
    """Memory after the answers by process: its service or program, children with a number."""

    @property
    def total_bytes(self) -> int:
        return sum(self.pss_bytes.values())


def measure_up(model: str) -> UpResult:
    """Start a mesh, let it answer, and end it. Raises RuntimeError when it does not start."""
    port = free_port()
    url, began_s = f"http://{LOOPBACK}:{port}", monotonic_s()
    with serving([model], port) as mesh:
        if not is_ready(mesh, url):
            raise RuntimeError(f"the mesh of {model} ended with exit code {mesh.returncode}")
        ready_s = monotonic_s() - began_s
        with httpx.Client(base_url=url, timeout=600, trust_env=False) as client:
            name = client.get("/v1/models").json()["data"][0]["id"]
            for number in range(ANSWERS):
                _ask(client, name, f"Tell me a story about a fox and {number} hens")
        return UpResult(ready_s, pss_of(mesh.pid))


def _ask(client: httpx.Client, model: str, text: str) -> None:
    """A chat; a completion where the file has no chat template."""
    limits = {"model": model, "max_tokens": _TOKENS}
    messages = [{"role": "user", "content": text}]
    answer = client.post("/v1/chat/completions", json={**limits, "messages": messages})
    if answer.status_code == httpx.codes.BAD_REQUEST:
        answer = client.post("/v1/completions", json={**limits, "prompt": text})
    answer.raise_for_status()


def pss_of(pid: int) -> dict[str, int]:
    """The memory of a process and of all its descendants, by name."""
    found: dict[str, int] = {}
    todo = [pid]
    while todo:
        each = todo.pop()
        tasks = Path(f"/proc/{each}/task").glob("*/children")
        todo += [int(child) for task in tasks for child in task.read_text().split()]
        lines = Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()
        kib = next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        words = Path(f"/proc/{each}/cmdline").read_text().split("\0")
        name = _name_of(words)
        found[f"{name} {len(found)}" if name in found else name] = kib * 1024
    return found


def _name_of(words: list[str]) -> str:
    if "serve" in words:
        return words[words.index("serve") + 1]
    modules = [word.rpartition(".")[2] for word in words if word.startswith("tokenmesh.services")]
    return modules[0] if modules else "up" if "up" in words else Path(words[0]).name


def report_up(results: list[UpResult]) -> str:
    """The round with the least time to ready."""
    best = min(results, key=lambda each: each.ready_s)
    lines = [f"{name:<16} {size / 1e6:8.0f} MB" for name, size in best.pss_bytes.items()]
    lines.append(f"{'all':<16} {best.total_bytes / 1e6:8.0f} MB")
    return "\n".join([*lines, f"ready after {best.ready_s:.1f} s"])


def main_up(model: str, rounds: int) -> int:
    """Print it."""
    sys.stdout.write(report_up([measure_up(model) for _ in range(rounds)]) + "\n")
    return 0

"""The requests of docs/cookbook.md get the answers that the page shows."""

import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
from transformers import AutoModelForCausalLM

from tests.e2e.mesh_process import mesh
from tests.fakes.adapters import write_adapter
from tests.fakes.pages import ROOT
from tests.fakes.sim_poolers import sim_poolers
from tests.servers import Server
from tokenmesh.cli.embedded.ports import free_port
from tokenmesh.demo_model import PATH as DEMO_MODEL

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

PAGE = ROOT / "docs/cookbook.md"
BLOCK = re.compile(r"^```(sh|python|json|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ADDRESS = "127.0.0.1:8000"
POOLERS = "127.0.0.1:8001"
BETWEEN = "\x1e"
FLAGS = (
    "--enable-admin-routes",
    "--enable-lora",
    "--enable-scale-out",
    "--enable-tokenizer-info-endpoint",
)
TIMEOUT_S = 60.0


@pytest.mark.parametrize(
    ("output", "answer"),
    [
        ('{"a": 1}', '{"a":1}'),
        ('{"a":1,"b":[2],"c":3}', '{"a": ..., "c": 3}'),
        ('{"a":1,"b":2}', '{"a": 1, ..., "b": 2, ...}'),
    ],
)
def test_answers_may_be_shortened(output: str, answer: str) -> None:
    assert matches(output, answer)


@pytest.mark.parametrize(
    ("output", "answer"),
    [
        ('{"a":1}', '{"a":2}'),
        ('{"a":1,"b":2}', '{"a":1}'),
        ('{"a":1}', '{..., "b": 1}'),
        ("ab", "...a"),
    ],
)
def test_answers_may_not_differ(output: str, answer: str) -> None:
    assert not matches(output, answer)


def test_requests_get_the_answers_that_are_shown(
    tmp_path: Path, nats_server: Server, redis_server: Server
) -> None:
    text = PAGE.read_text(encoding="utf-8")
    port = free_port()
    adapters = tmp_path / "adapters"
    write_adapter(AutoModelForCausalLM.from_pretrained(DEMO_MODEL), adapters / "sql")
    folders = ("--profiler-dir", str(tmp_path / "profiles"), "--lora-allowed-dirs", str(adapters))
    with (
        mesh(port, *FLAGS, *folders) as running,
        sim_poolers(tmp_path, nats_server, redis_server) as poolers,
    ):
        sent = text.replace(ADDRESS, running.url.removeprefix("http://"))
        sent = sent.replace('"/adapters/', f'"{adapters}/')
        found = BLOCK.findall(sent.replace(POOLERS, poolers))
        outputs = run(found, tmp_path)
        routes = httpx.get(f"{running.url}/openapi.json").json()["paths"]
    missing = [each for each in routes if not re.search(re.sub(r"{[^}]+}", "[^/ ]+", each), text)]
    assert missing == []
    pairs = list(zip(found, outputs, strict=True))
    checked = 0
    for ((language, source), output), ((shown, answer), _) in pairwise(pairs):
        if language in ("sh", "python") and shown in ("json", "text"):
            assert matches(output, answer), f"{source}\n{answer}\n{output[:4000]}"
            checked += 1
    assert checked > 20


def run(found: list[tuple[str, str]], folder: Path) -> list[str]:
    """The output of each block in one shell, so that they share its variables; "" for answers."""
    lines = []
    for number, (language, source) in enumerate(found):
        if language == "sh":
            lines.append(source)
        elif language == "python":
            (folder / f"{number}.py").write_text(source, encoding="utf-8")
            lines.append(f"{sys.executable} {number}.py\n")
        lines.append(f"printf '{BETWEEN}'\n")
    done = subprocess.run(
        ["bash", "-c", "".join(lines)],
        cwd=folder,
        capture_output=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    return done.stdout.decode().split(BETWEEN)[:-1]


def dense(text: str) -> str:
    """Without white space, which the page may set differently."""
    return "".join(text.split())


def matches(output: str, answer: str) -> bool:
    """Return whether an output is as the page shows it; `...`, or `, ...`, matches any text."""
    first, *others = dense(answer).replace(",...", "...").split("...")
    rest = dense(output)
    if not others:
        return rest == first
    if not rest.startswith(first):
        return False
    rest = rest.removeprefix(first)
    for part in others[:-1]:
        _, found, rest = rest.partition(part) if part else ("", "-", rest)
        if not found:
            return False
    return rest.endswith(others[-1])

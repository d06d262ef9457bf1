"""The commands of the guides run as they are written: with a hub's cache instead of the hub.

Each page has its folder. `tokenmesh up` is ready, answers and takes the requests that follow it on
the page; every other command of `tokenmesh` and `curl` succeeds.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.e2e.mesh_process import mesh
from tests.fakes.adapters import write_adapter
from tests.fakes.pages import ROOT, blocks
from tokenmesh.cli.embedded.ports import free_port
from tokenmesh.demo_model import PATH as DEMO_MODEL

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

HUB_IDS = ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen3-0.6B", "Qwen/Qwen2.5-Coder-0.5B")
ADDRESS = "http://127.0.0.1:8000"
PAGES = (
    "guides/small-machines.md",
    "guides/serve-adapters.md",
    "guides/models-on-demand.md",
    "guides/serve-a-model.md",
    "guides/add-a-model.md",
    "guides/prefill-apart.md",
)
MORE_FLAGS = {"guides/serve-adapters.md": ["--enable-admin-routes", "--lora-allowed-dirs", "/"]}
"""Flags that a page demands in its text."""
ELSEWHERE = (".gguf", "make ", "python ", "cp ", ".venv", "tokenmesh chat", "tokenmesh top")
"""Files that a user brings, targets of make, and programs for a terminal; others test these."""
TIMEOUT_S = 120.0


def test_commands_of_the_guides_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_hub(tmp_path / "hub")
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL)
    for name in ("sql", "chat", "law"):
        write_adapter(model, tmp_path / "adapters" / name)
    for name in ("my-model", "Qwen2.5-0.5B-Instruct", "qwen"):
        copy_model(tmp_path / "home/models" / name)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    started = 0
    for page in PAGES:
        folder = tmp_path / page.replace("/", "-")
        folder.mkdir()
        (folder / "text.txt").write_text("What is 27 + 45?\n27 + 45 = 72\n" * 400)
        monkeypatch.chdir(folder)
        started += run_page(page, tmp_path)
    assert started >= 10


def test_commands_of_the_guide_to_ranks_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_model(tmp_path / "my-model")
    copy_model(tmp_path / "my-mixture")
    write_mixture(tmp_path / "my-mixture")
    monkeypatch.chdir(tmp_path)
    # the lines of torchrun are those of test_two_hosts.py
    assert run_page("guides/more-than-one-device.md", tmp_path) == 2


def write_mixture(folder: Path) -> None:
    """A mixture of experts in the place of a model, with its tokenizer."""
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = json.loads((folder / "config.json").read_text())
    kept = {key: config[key] for key in ("vocab_size", "max_position_embeddings")}
    made = Qwen3MoeConfig(hidden_size=64, num_hidden_layers=2, **sizes, **heads, **kept)
    Qwen3MoeForCausalLM(made).save_pretrained(folder)


def run_page(page: str, folder: Path) -> int:
    """Run its commands in order; how many meshes it has started."""
    started, url = 0, ""
    with ExitStack() as stack:
        for line in commands_of(page):
            words = shlex.split(line.replace("/adapters/", f"{folder}/adapters/"), comments=True)
            words = [os.path.expanduser(each) for each in words]
            if words[:2] == ["tokenmesh", "up"]:
                stack.close()
                flags = [*words[2:], *MORE_FLAGS.get(page, ())]
                url = stack.enter_context(mesh(free_port(), *flags)).url
                assert answers(url), line
                started += 1
            elif words[0] in ("tokenmesh", "curl"):
                run(words, url)
    return started


def commands_of(page: str) -> Iterator[str]:
    for block in blocks(ROOT / "docs" / page, "", "sh", "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            if line.strip() and not any(each in line for each in ELSEWHERE):
                yield line


def run(words: list[str], url: str) -> None:
    """A command of ours, or a request for the mesh that runs."""
    if words[0] == "curl":
        words = ["curl", "--fail-with-body", *(each.replace(ADDRESS, url) for each in words[1:])]
    else:
        words = [sys.executable, "-m", *words]
    done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}{done.stderr}"


def answers(url: str) -> bool:
    """Return whether each model of a mesh completes a text."""
    with httpx.Client(base_url=url, timeout=TIMEOUT_S) as client:
        names = [each["id"] for each in client.get("/v1/models").json()["data"]]
        bodies = [{"model": name, "prompt": "Hi", "max_tokens": 2} for name in names]
        return all(client.post("/v1/completions", json=each).is_success for each in bodies)


def copy_model(folder: Path) -> None:
    """The demo model, made for prompts as long as those of the models that pages name."""
    shutil.copytree(DEMO_MODEL, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = 32_768
    (folder / "config.json").write_text(json.dumps(config))


def write_hub(folder: Path) -> None:
    """A cache as huggingface_hub lays it out, with the demo model under each id."""
    for hub_id in HUB_IDS:
        repo = folder / f"models--{hub_id.replace('/', '--')}"
        copy_model(repo / "snapshots" / ("a" * 40))
        (repo / "refs").mkdir()
        (repo / "refs/main").write_text("a" * 40)


def test_the_pages_name_no_other_model() -> None:
    named = {
        each
        for page in PAGES
        for line in commands_of(page)
        for each in re.findall(r"(?<![\w/.~-])[A-Z]\w+/[\w.-]+", line)
    }
    assert named <= set(HUB_IDS)

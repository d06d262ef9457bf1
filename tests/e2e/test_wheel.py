"""The wheel in empty environments: a light command line, and an answer with the extra `cpu`."""

import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.test_distribution import build
from tokenmesh.cli.embedded.ports import free_port

READY_S = 180.0
pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(1800)]


class Environment:
    """A virtual environment and its commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)

    def install(self, *requirements: str) -> None:
        pip = [str(self.folder / "bin/python"), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, *requirements], check=True)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """The command `tokenmesh`, in a folder that is not the repository."""
        command = [str(self.folder / "bin/tokenmesh"), *words]
        return subprocess.run(
            command, cwd=self.folder, capture_output=True, text=True, check=False, timeout=60
        )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("dist")
    build(folder)
    (path,) = folder.glob("*.whl")
    return str(path)


def test_without_extras_there_is_a_command_line_that_names_them(wheel: str, tmp_path: Path) -> None:
    environment = Environment(tmp_path / "light")
    environment.install(wheel)
    assert not list(environment.folder.glob("lib/*/site-packages/torch"))
    assert environment.run("--version").stdout.startswith("tokenmesh ")
    for words, extra in ((("serve", "gateway"), "`gateway`"), (("up",), "`cpu`")):
        result = environment.run(*words)
        assert result.returncode == 2
        assert f"extra {extra}" in " ".join(result.stderr.split())


def test_with_the_extra_cpu_the_demo_model_answers(wheel: str, tmp_path: Path) -> None:
    environment = Environment(tmp_path / "cpu")
    # the CPU build where pip is configured to find one
    environment.install("torch==2.13.0")
    environment.install(f"{wheel}[cpu]")
    port = free_port()
    command = [str(environment.folder / "bin/tokenmesh"), "up", "--port", str(port)]
    with subprocess.Popen(command, cwd=tmp_path) as process:
        try:
            content = answer(f"http://127.0.0.1:{port}", process)
        finally:
            process.terminate()
            process.wait(60)
    assert "72" in content


def answer(url: str, process: subprocess.Popen[bytes]) -> str:
    """The content of the answer of a mesh that is starting."""
    give_up = time.monotonic() + READY_S
    while not is_ready(url):
        assert process.poll() is None
        assert time.monotonic() < give_up
        time.sleep(0.2)
    message = {"role": "user", "content": "What is 27 + 45?"}
    body = {"model": "tokenmesh-demo", "messages": [message]}
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60.0)
    return str(response.json()["choices"][0]["message"]["content"])


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=2.0).is_success
    except httpx.HTTPError:
        return False

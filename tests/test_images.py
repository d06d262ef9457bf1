"""The images as docker or podman builds and runs them: `make test-images`, which takes minutes.

CONTAINERS names the program; nothing here runs without it. BUILD_OPTIONS are more options of its
command `build`, such as `--build-arg TORCH_INDEX=URL`.
"""

import json
import os
import shlex
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from urllib.error import URLError

import pytest

from tests.unit.test_compose import LIGHT, ROOT, stages
from tokenmesh.shared.services import SERVICE_BY_NAME

CONTAINERS = os.environ.get("CONTAINERS", "")
TARGETS = (*sorted(SERVICE_BY_NAME), "all")
HARDENED = ("--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", "--security-opt=no-new-privileges")
READY_WITHIN_S = 120.0
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),  # a first build fetches 400 MB
    pytest.mark.skipif(not CONTAINERS, reason="CONTAINERS names no program, docker or podman"),
]

INSIDE = """
import json, shutil
from importlib.util import find_spec
from pathlib import Path
print(json.dumps({
    "libraries": [name for name in ("torch", "transformers", "triton") if find_spec(name)],
    "compilers": [name for name in ("cc", "gcc", "clang") if shutil.which(name)],
    "kernels": len(list(Path("/app/kernels").glob("*.so"))),
}))
"""


def run(*words: str) -> str:
    result = subprocess.run([CONTAINERS, *words], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, f"{words}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
    return result.stdout.strip()


@pytest.fixture(scope="module")
def images() -> dict[str, str]:
    """Target of the Dockerfile -> its image."""
    names = {target: f"tokenmesh-test-{target}" for target in TARGETS}
    assert names.keys() <= stages().keys()
    more = shlex.split(os.environ.get("BUILD_OPTIONS", ""))
    for target, name in names.items():
        file = ("-f", "compose/Dockerfile", "--target", target, "-t", name)
        run("build", *file, *more, ".")
    return names


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_holds_what_its_service_needs_and_no_more(
    images: dict[str, str], target: str
) -> None:
    image = images[target]
    size = int(run("image", "inspect", "--format", "{{.Size}}", image))
    print(f"{target}: {size / 1e6:,.0f} MB")  # noqa: T201
    assert run("image", "inspect", "--format", "{{.Config.User}}", image) == "10001"
    inside = json.loads(
        run("run", "--rm", *HARDENED, "--entrypoint", "python", image, "-c", INSIDE)
    )
    libraries = {"tokenizer": ["transformers"], **{light: list[str]() for light in LIGHT}}
    assert inside["libraries"] == libraries.get(target, ["torch", "transformers"])
    assert inside["compilers"] == []
    assert (inside["kernels"] > 0) == (target in ("worker", "all"))
    words = run("run", "--rm", *HARDENED, "--entrypoint", "tokenmesh", image, "--version")
    assert words


@pytest.mark.parametrize("target", ["worker", "all"])
def test_a_worker_finds_its_kernels_without_a_compiler(images: dict[str, str], target: str) -> None:
    code = (
        "from pathlib import Path; from tokenmesh.kernels.native.build import *\n"
        "for level in LEVELS: compiled(Path('/app/kernels'), level)"
    )
    run("run", "--rm", *HARDENED, "--entrypoint", "python", images[target], "-c", code)


@pytest.fixture
def container(images: dict[str, str]) -> Iterator[str]:
    """`tokenmesh up` as the image starts it."""
    found = run("run", "--detach", "--publish", "127.0.0.1::8000", *HARDENED, images["all"])
    yield found
    run("rm", "--force", found)


def test_one_container_answers_and_stops_in_order(container: str) -> None:
    url = f"http://{run('port', container, '8000').splitlines()[0]}"
    until_s = time.monotonic() + READY_WITHIN_S
    while not is_ready(url):
        assert time.monotonic() < until_s, run("logs", container)
        time.sleep(0.5)
    body = {
        "model": "tokenmesh-demo",
        "messages": [{"role": "user", "content": "Who are you?"}],
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        (choice,) = json.load(answer)["choices"]
    assert "TokenMesh" in choice["message"]["content"]
    run("stop", "--time", "60", container)
    assert run("inspect", "--format", "{{.State.ExitCode}}", container) == "0"


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=5) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False

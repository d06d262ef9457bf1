"""`tokenmesh up` starts a mesh that answers, survives deaths, and leaves nothing behind."""

import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.mesh_process import MeshProcess, alive, chat, mesh
from tokenmesh.cli.embedded.ports import free_port
from tokenmesh.shared.config.loader import DEMO_MODEL

HUNG_S = 5.0
MAX_RESTARTS = 1

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]


def cli(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tokenmesh", *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, *arguments: str, home: Path) -> None:
        self.shown = ""
        """All that it has written since the last `forget`."""
        self._master, slave = pty.openpty()
        own = {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "HOME": str(home)}
        environment = {**os.environ, **own}
        command = [sys.executable, "-m", "tokenmesh", *arguments]
        self._process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, close_fds=True
        )
        os.close(slave)

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(10)
        os.close(self._master)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def forget(self) -> None:
        self.shown = self.shown.rpartition("\n")[2]

    def wait_for(self, text: str) -> None:
        give_up = time.monotonic() + 30
        while text not in self.shown:
            assert time.monotonic() < give_up, self.shown
            if select.select([self._master], [], [], 0.1)[0]:
                self.shown += os.read(self._master, 4096).decode(errors="replace")


def private_folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("tokenmesh-*"))


@pytest.fixture(scope="module")
def running() -> Iterator[MeshProcess]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENMESH_UP__HUNG_S", str(HUNG_S))
        patch.setenv("TOKENMESH_UP__MAX_RESTARTS", str(MAX_RESTARTS))
        with mesh(free_port()) as process:
            yield process


def test_the_demo_model_answers_with_sensible_text(running: MeshProcess) -> None:
    answer = chat(running.url, "What is 17 + 25?", temperature=0)
    assert answer.status_code == 200, answer.text
    assert "42" in answer.json()["choices"][0]["message"]["content"]


def test_no_service_lacks_a_right_that_it_needs(running: MeshProcess) -> None:
    body = {"model": "tokenmesh-demo", "input": "What is 17 + 25?", "background": True}
    kept = httpx.post(f"{running.url}/v1/responses", json=body, timeout=60).json()
    give_up = time.monotonic() + 60
    while kept["status"] != "completed":
        assert time.monotonic() < give_up, kept
        time.sleep(0.1)
        kept = httpx.get(f"{running.url}/v1/responses/{kept['id']}", timeout=60).json()
    metrics = httpx.get(f"{running.url}/metrics", timeout=60).text
    # the probe of the chart takes this for ready
    assert 'actor="ProcessControl"' in metrics
    assert "prefix_index_current{" in metrics
    # warnings of all services are shown
    for refusal in ("permissions violation", "redis refuses"):
        assert refusal not in running.output.lower()


def test_the_screen_tells_what_a_user_needs(running: MeshProcess) -> None:
    for part in (running.url, "tokenmesh-demo", "curl ", "tokenmesh trace", "Ctrl-C"):
        assert part in running.output


def test_the_curl_of_the_screen_can_be_pasted(running: MeshProcess) -> None:
    command = running.output[running.output.index("curl ") :].partition("\n\n")[0]
    answer = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert '"choices"' in answer.stdout, answer


def test_chat_works_through_a_pipe(running: MeshProcess) -> None:
    answer = cli("chat", "--url", running.url, "--temperature", "0", text="What is 17 + 25?\n")
    assert answer.returncode == 0, answer.stderr
    assert "42" in answer.stdout


def test_chat_has_line_editing_and_history_and_names_its_gateway(
    running: MeshProcess, tmp_path: Path
) -> None:
    with Terminal("chat", "--url", running.url, "--temperature", "0", home=tmp_path) as chat:
        chat.wait_for("> ")
        # A mistake that the left arrow and backspace put right.
        chat.type("What is 17 + 95?" + "\x1b[D" * 2 + "\x7f2" + "\r")
        chat.wait_for(f"--url {running.url}")
        assert "17 + 25 = 42" in chat.shown
        chat.forget()
        chat.wait_for("> ")
        chat.type("\x1b[A\r")
        chat.wait_for(f"--url {running.url}")
        assert "17 + 25 = 42" in chat.shown
        assert "tokens/s" in chat.shown
        assert "^[" not in chat.shown
    history = tmp_path / ".local/state/tokenmesh/chat_history"
    assert history.stat().st_mode & 0o077 == 0


def test_a_trace_is_drawn_for_the_id_of_an_answer(running: MeshProcess) -> None:
    request_id = chat(running.url, "hello").json()["id"]
    give_up = time.monotonic() + 10
    while (drawn := cli("trace", request_id, "--url", running.url)).returncode:
        assert time.monotonic() < give_up, drawn.stderr
    for name in ("http", "tokenize", "place", "generate", "worker.prefill"):
        assert name in drawn.stdout


def test_a_second_mesh_on_the_port_says_so_and_how_to_change_it(running: MeshProcess) -> None:
    port = running.url.rpartition(":")[2]
    before = private_folders()
    answer = cli("up", "--port", port)
    assert answer.returncode == 2
    assert f"port {port} on 127.0.0.1 is in use" in answer.stderr
    assert "--port " in answer.stderr
    assert private_folders() <= before


@pytest.mark.parametrize(
    ("name", "program"),
    [
        ("worker", "worker"),
        ("tokenizer", "tokenizer"),
        ("scheduler", "scheduler"),
        ("nats", "nats-server"),
        ("redis", "redis-server"),
        ("gateway", "gateway"),
    ],
)
def test_whatever_dies_is_replaced_and_said_so(
    running: MeshProcess, name: str, program: str
) -> None:
    running.service(program).kill()
    give_up = time.monotonic() + 60
    while f"{name} died" not in running.output or not _answers(running.url):
        assert time.monotonic() < give_up, running.output
        time.sleep(0.2)


@pytest.mark.parametrize("program", ["gateway", "nats-server"])
def test_what_answers_no_more_is_replaced_and_said_so(running: MeshProcess, program: str) -> None:
    frozen = running.service(program)
    frozen.suspend()
    give_up = time.monotonic() + 60
    while frozen.is_running() or not _answers(running.url):
        assert time.monotonic() < give_up, running.output
        time.sleep(0.2)
    assert "did not answer for up.hung_s" in running.output


def test_a_process_that_pauses_for_a_moment_goes_on(running: MeshProcess) -> None:
    gateway = running.service("gateway")
    gateway.suspend()
    time.sleep(1)
    gateway.resume()
    assert _answers(running.url)
    assert running.service("gateway") == gateway


def test_a_process_that_keeps_dying_does_not_take_the_mesh_down(running: MeshProcess) -> None:
    gateway = running.service("gateway")
    begun, deaths = len(running.output), MAX_RESTARTS + 2
    give_up = time.monotonic() + 90
    for _ in range(deaths):
        while (victim := _find(running, "encoder")) is None:
            assert time.monotonic() < give_up, running.output
            time.sleep(0.05)
        victim.kill()
        victim.wait(10)
    while f"encoder died, {deaths} times in a row" not in running.output[begun:]:
        assert time.monotonic() < give_up, running.output
        time.sleep(0.05)
    assert running.process.poll() is None
    assert running.service("gateway") == gateway
    assert _answers(running.url)


def test_no_secret_is_in_the_arguments_of_a_process(running: MeshProcess) -> None:
    (folder,) = {
        Path(word).parent
        for child in running.family()
        for word in child.cmdline()
        if word.endswith("services.json")
    }
    config = (folder / "gateway-services.json").read_text()
    password = config.partition('"password": "')[2].partition('"')[0]
    assert len(password) >= 32
    assert not any(password in " ".join(child.cmdline()) for child in running.family())


def test_ctrl_c_lets_a_running_answer_finish_and_leaves_nothing_behind() -> None:
    before = private_folders()
    with mesh(free_port(), "--engine", "sim") as process:
        assert private_folders() != before
        family = process.family()
        assert len(family) >= 7
        body = {
            "model": "tokenmesh-demo",
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 200,
            "ignore_eos": True,
            "stream": True,
        }
        url = f"{process.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.process.send_signal(signal.SIGINT)
            rest = list(lines)
        assert '"finish_reason":"length"' in "".join(rest)
        assert rest[-2:] == ["data: [DONE]", ""]
        assert process.process.wait(30) == 0
        assert alive(family) == []
        assert private_folders() <= before
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{process.url}/livez")


def test_ctrl_c_while_starting_leaves_nothing_behind() -> None:
    before = private_folders()
    process = MeshProcess(free_port())
    try:
        give_up = time.monotonic() + 30
        while len(process.family()) < 3:
            assert time.monotonic() < give_up, process.output
            time.sleep(0.05)
        family = process.family()
        process.interrupt()
        assert alive(family) == []
        assert private_folders() <= before
    finally:
        process.kill()


@pytest.mark.parametrize(
    "kind",
    [
        "absent",
        "no_weights",
        pytest.param("empty", marks=pytest.mark.slow),
        pytest.param("no_json", marks=pytest.mark.slow),
    ],
)
def test_a_model_that_is_none_is_explained_without_a_traceback(tmp_path: Path, kind: str) -> None:
    model = tmp_path / kind
    if kind != "absent":
        model.mkdir()
    if kind == "no_json":
        (model / "config.json").write_text("{")
    if kind == "no_weights":
        shutil.copytree(DEMO_MODEL, model, dirs_exist_ok=True)
        (model / "model.safetensors").write_bytes(b"truncated")
    answer = cli("up", str(model), "--port", str(free_port()))
    assert answer.returncode == 2, answer.stdout + answer.stderr
    shown = answer.stdout + answer.stderr
    assert str(model) in shown
    assert "Traceback" not in shown
    assert "ready" not in shown


def test_a_model_that_cannot_be_loaded_leaves_the_other_to_serve(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(DEMO_MODEL, broken)
    (broken / "model.safetensors").write_bytes(b"truncated")
    with mesh(free_port(), str(DEMO_MODEL), str(broken)) as process:
        assert f"{broken} is not served: {broken}/model.safetensors" in process.output
        served = httpx.get(f"{process.url}/v1/models").json()["data"]
        assert [each["id"] for each in served] == [str(DEMO_MODEL)]
        command = process.output[process.output.index("curl ") :].partition("\n\n")[0]
        answer = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
        assert "Tokyo" in json.loads(answer.stdout)["choices"][0]["message"]["content"]
    strict = cli("up", "--strict", str(DEMO_MODEL), str(broken), "--port", str(free_port()))
    assert strict.returncode == 2


def test_local_runner_starts_the_commands_of_the_compose_file() -> None:
    port = free_port()
    script = Path(__file__).resolve().parents[2] / "scripts/run_local_mesh.py"
    process = psutil.Popen(
        [sys.executable, str(script), "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        give_up = time.monotonic() + 120
        while not _is_ready(port):
            assert process.poll() is None
            assert time.monotonic() < give_up
            time.sleep(0.2)
        answer = chat(f"http://127.0.0.1:{port}", "What is 17 + 25?", temperature=0)
        assert "42" in answer.json()["choices"][0]["message"]["content"]
        family = process.children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert alive(family) == []
    finally:
        if process.is_running():
            process.kill()


def _find(running: MeshProcess, name: str) -> psutil.Process | None:
    try:
        return running.service(name)
    except (LookupError, psutil.NoSuchProcess):
        return None


def _answers(url: str) -> bool:
    try:
        return chat(url, "hello").is_success
    except httpx.TransportError:
        return False


def _is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200
    except httpx.TransportError:
        return False

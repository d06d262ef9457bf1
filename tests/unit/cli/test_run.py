"""`tokenmesh run` hands its flags to `up` and ends with the mesh or the chat."""

import subprocess
import sys

import pytest

from tokenmesh.cli import run as run_module
from tokenmesh.cli.main import MISUSE, run


def started(monkeypatch: pytest.MonkeyPatch, program: str) -> list[tuple[str, ...]]:
    """Run a Python program in place of the mesh; the commands that would have run."""
    commands: list[tuple[str, ...]] = []
    plain = subprocess.Popen

    def popen(command: tuple[str, ...], **options: object) -> "subprocess.Popen[bytes]":
        commands.append(command)
        words = [sys.executable, "-c", program, command[-1]]
        return plain(words, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(subprocess, "Popen", popen)
    return commands


def test_flags_go_to_up_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = started(monkeypatch, "raise SystemExit(2)")
    line = "run some/model --max-model-len 4k --enforce-eager --served-model-name a b"
    assert run(line.split()) == 2
    ((_, *command),) = commands
    assert command[:3] == ["-m", "tokenmesh", "up"]
    assert command[3:-2] == line.split()[1:]
    assert command[-2].startswith("--port=")


def test_the_mesh_ends_with_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    tell = "import os, sys, time; os.write(int(sys.argv[-1].split('=')[1]), b'1'); time.sleep(60)"
    started(monkeypatch, tell)
    chats: list[str] = []
    monkeypatch.setattr(run_module, "chat", lambda url, api_key: chats.append(url))
    assert run(["run"]) == 0
    assert len(chats) == 1


@pytest.mark.parametrize("flag", ["--port", "--host=0.0.0.0", "--uds"])
def test_the_address_cannot_be_chosen(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", flag, "1"]) == MISUSE
    assert "free port" in capsys.readouterr().err

"""`tokenmesh run`: serve a model and chat with it, in one terminal."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Final

import httpx
import typer

from tokenmesh.cli.api import DIRECT
from tokenmesh.cli.chat import chat
from tokenmesh.cli.embedded.ports import LOOPBACK, free_port
from tokenmesh.shared.clock import sleep_s
from tokenmesh.shared.errors import ConfigError
from tokenmesh.shared.parent_death import dies_with_parent

_POLL_S: Final = 0.1
_PROBE_S: Final = 1.0
_ADDRESS: Final = ("--host", "--port", "--uds")


def run_model(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] [FLAGS]", help="As for `tokenmesh up`, but for the address."
        ),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="A key that the mesh requires, and the chat sends.")
    ] = None,
) -> None:
    """Serve a model and chat with it; the mesh ends with the chat."""
    given = words or []
    for word in given:
        if word.partition("=")[0] in _ADDRESS:
            raise ConfigError(f"{word}: `tokenmesh run` listens on a free port", param=word)
    if api_key is not None:
        given = [*given, "--api-key", api_key]
    port = free_port()
    reading, writing = os.pipe()
    with open(reading, "rb") as ready, serving(given, port, writing) as mesh:
        os.close(writing)  # the mesh has it: what is read ends with the mesh
        if ready.read(1):
            chat(url=f"http://{LOOPBACK}:{port}", api_key=api_key)
            return
    raise typer.Exit(mesh.returncode or 1)


@contextmanager
def serving(
    words: Sequence[str], port: int, ready_fd: int | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    """`tokenmesh up` as a process of its own, which Ctrl-C in the chat does not reach.

    ready_fd: where it writes a byte when it is ready, instead of its ready screen.
    """
    command = [sys.executable, "-m", "tokenmesh", "up", *words, f"--port={port}"]
    fds = () if ready_fd is None else (ready_fd,)
    mesh = subprocess.Popen(
        [*command, *(f"--ready-fd={fd}" for fd in fds)],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=dies_with_parent(),
        pass_fds=fds,
    )
    try:
        yield mesh
    finally:
        if mesh.poll() is None:
            # Not SIGINT, which it may have inherited as ignored, or miss while it starts.
            mesh.terminate()
        mesh.wait()


def is_ready(mesh: "subprocess.Popen[bytes]", url: str) -> bool:
    """Wait until the mesh answers; False when it has ended."""
    with httpx.Client(base_url=url, timeout=_PROBE_S, mounts=DIRECT) as client:
        while mesh.poll() is None:
            try:
                if client.get("/readyz").is_success:
                    return True
            except httpx.TransportError:
                pass
            sleep_s(_POLL_S)
    return False

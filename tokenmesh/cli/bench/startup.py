"""Measures the time until `tokenmesh up` is ready, and until it has answered."""

from collections.abc import Sequence
from typing import NamedTuple

from tokenmesh.cli.api import GatewayClient
from tokenmesh.cli.embedded.ports import LOOPBACK, free_port
from tokenmesh.cli.run import is_ready, serving
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.errors import Unavailable


class Starts(NamedTuple):
    """Seconds of each round, from the start of the process."""

    ready_s: list[float]
    token_s: list[float]
    """Until the first token."""


def measure_starts(words: Sequence[str], rounds: int) -> Starts:
    """Start a mesh and end it, `rounds` times. Raises Unavailable when it does not start."""
    starts = Starts([], [])
    for _ in range(rounds):
        port = free_port()
        url = f"http://{LOOPBACK}:{port}"
        began_s = monotonic_s()
        with serving(words, port) as mesh, GatewayClient(url) as api:
            if not is_ready(mesh, url):
                raise Unavailable(f"the mesh ended with exit code {mesh.returncode}")
            starts.ready_s.append(monotonic_s() - began_s)
            question = [{"role": "user", "content": "Hello"}]
            next(api.chat(api.models()[0], question, {"max_tokens": 1}))
            starts.token_s.append(monotonic_s() - began_s)
    return starts

"""A mesh of the benchmark's own: `tokenmesh up` on a free port, ended afterwards."""

import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks.serve.own_server import own_server


@asynccontextmanager
async def own_mesh(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    scheme: str = "http",
) -> AsyncIterator[str]:
    """Its base URL, once it is ready; what it writes goes to `log`.

    Raises RuntimeError or TimeoutError when it does not start.
    """
    command = [sys.executable, "-m", "tokenmesh", "up", *arguments]
    async with own_server(
        command, "/readyz", {**os.environ, **environment}, log, scheme=scheme
    ) as server:
        yield server.url

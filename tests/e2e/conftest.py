"""The mesh of tests that need nothing of their own."""

from collections.abc import Iterator

import pytest

from tests.e2e.mesh_process import MeshProcess, mesh
from tokenmesh.cli.embedded.ports import free_port


@pytest.fixture(scope="package")
def demo_mesh() -> Iterator[MeshProcess]:
    """A mesh with the demo model, ready. Its processes may be killed, but not for good."""
    with mesh(free_port()) as process:
        yield process

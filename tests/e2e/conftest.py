"""The mesh that most tests share."""

from collections.abc import Iterator

import pytest

from tests.e2e.mesh_process import MeshProcess, mesh
from tokenmesh.cli.embedded.ports import free_port


@pytest.fixture(scope="package")
def demo_mesh() -> Iterator[MeshProcess]:
    """A mesh with the demo model and two workers, ready.

    A test may kill its processes, which start again; one that needs both workers calls
    `wait_workers` first.
    """
    with pytest.MonkeyPatch.context() as patch:
        # Deaths in one test do not delay the restart after a death in the next one.
        patch.setenv("TOKENMESH_UP__RESTART_MAX_S", "0.5")
        with mesh(free_port(), "--workers", "2") as process:
            yield process

"""Makes a process of the mesh of actors. Start reading in run.py."""

from tokenmesh.shared.service.mesh import Mesh
from tokenmesh.shared.service.run import run_service, serve

__all__ = ["Mesh", "run_service", "serve"]

"""UnservedModel: why the general kind does not serve an architecture."""

from tokenmesh.shared.errors import CheckpointError


class UnservedModel(CheckpointError):
    """Its message completes "ARCHITECTURE cannot be served: "."""

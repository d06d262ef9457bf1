"""Errors in Ollama's shape: {"error"}."""

import msgspec

from tokenmesh.shared.errors import TokenMeshError


class OllamaError(msgspec.Struct):
    error: str


def write_error(error: TokenMeshError, _context: object) -> tuple[OllamaError, int]:
    """The body of a response and its status."""
    return OllamaError(error.message), error.status

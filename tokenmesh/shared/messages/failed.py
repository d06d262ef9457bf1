"""Failed: the answer of an actor that could not handle the message."""

from tokenmesh.shared.failed import (
    Failed,
    from_failed,
    to_failed,
)

__all__ = [
    "Failed",
    "from_failed",
    "to_failed",
]

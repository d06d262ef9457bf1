"""Names of fields of log records that other processes read."""

from typing import Final

PROGRESS: Final = "progress"
"""`extra={PROGRESS: share}` on a record: how much of something long is done, 0 to 1."""

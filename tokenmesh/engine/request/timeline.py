"""Timeline of a request.

Nothing is recorded per decoded token: each engine step adds one entry to the `StepLog`, and a
request records only when it began and stopped decoding. Spans are built from both after its end.
"""

from dataclasses import dataclass, field
from typing import NamedTuple


class Chunk(NamedTuple):
    start_ns: int
    end_ns: int
    num_tokens: int
    num_cached: int
    """Tokens that this chunk follows and that were not computed: a prefix hit, or from the host
    tier."""
    num_filled: int
    """Those from the host tier."""
    batch_size: int


@dataclass(slots=True)
class Timeline:
    """Times are wall-clock nanoseconds; 0 means that it did not happen."""

    arrived_ns: int = 0
    grammar_ns: int = 0
    """When its grammar was there, where it had to wait for that."""
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    ended_ns: int = 0
    chunks: list[Chunk] = field(default_factory=list)
    preempted_ns: list[int] = field(default_factory=list)

"""The shape of `results/ops_*.json`."""

import msgspec


class Limits(msgspec.Struct, frozen=True):
    """The limits of the machine, measured in the same run."""

    bytes_per_s: float
    flops_per_s: float

    def shortest_s(self, num_bytes: int, num_flops: int) -> float:
        """No implementation takes less time when everything comes from memory."""
        return max(num_bytes / self.bytes_per_s, num_flops / self.flops_per_s)


class Line(msgspec.Struct, frozen=True):
    """An op on a batch. Times are microseconds."""

    op: str
    batch: str
    us: float
    reference_us: float | None
    """None: it would take too long."""
    torch_us: float | None
    """None: torch has no such op."""
    gb_per_s: float
    tflop_per_s: float
    share: float
    """The share of the limit that binds: the shortest possible time over the measured one."""


class Sweep(msgspec.Struct):
    """A run."""

    config: dict[str, object]
    environment: dict[str, object]
    """From its start."""
    load_average_end: float
    device: str
    limits: Limits
    lines: list[Line]
    red: dict[str, str]
    """Ops that were not reported, and why."""

"""The shape of `results/engine.json`, `nano.json`, `bound.json` and `scheduler.json`."""

import msgspec


class DecodeLine(msgspec.Struct):
    """Tokens a second, the best round."""

    batch: int
    engine: float
    transformers: float


class NanoLine(msgspec.Struct):
    """nano-vllm's workload, or its first requests."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    engine_s: float
    transformers_s: float | None
    """None: not asked for."""


class EngineResult(msgspec.Struct):
    """A run of bench_engine."""

    config: dict[str, object]
    environment: dict[str, object]
    load_average_end: float
    decode: list[DecodeLine] = []
    nano: NanoLine | None = None


class SchedulerLine(msgspec.Struct):
    """CPU of a step in microseconds, as bench_scheduler prints it."""

    scheduler_us: float
    engine_us: float


class SchedulerResult(msgspec.Struct):
    """A run of bench_scheduler."""

    environment: dict[str, object]
    load_average_end: float
    lines: dict[int, SchedulerLine]
    """By running requests."""


class BoundLine(msgspec.Struct):
    """Medians of one model in milliseconds."""

    model: str
    step_ms: float
    read_ms: float
    """Milliseconds of the fastest kind of read."""
    read: str
    """The name of that kind."""

    @property
    def share(self) -> float:
        """1 would be a step that does nothing but read the weights once."""
        return self.read_ms / self.step_ms


class BoundResult(msgspec.Struct):
    """A run of bound."""

    threads: int
    environment: dict[str, object]
    load_average_end: float
    lines: list[BoundLine]

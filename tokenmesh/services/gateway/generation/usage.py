"""Usage: tokens counted for one response. Meters: its latencies and sizes as metrics."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from tokenmesh.services.gateway.generation.choice import Choice
from tokenmesh.services.gateway.generation.request import Prompt
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.metrics import Metrics

_MAX_SERIES: Final = 256
"""Pairs of model and worker whose metric objects are cached."""


class PromptTokensDetails(msgspec.Struct, omit_defaults=True):
    """Prompt tokens by where they came from."""

    cached_tokens: int
    created_cache_tokens: int | None = None
    """Tokens of full blocks that this prompt added to the prefix cache; None: unknown."""


class CompletionTokensDetails(msgspec.Struct):
    """Generated tokens by what they were used for."""

    reasoning_tokens: int


class Usage(msgspec.Struct):
    """Tokens of a response over all its choices."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


def usage_of(
    prompt_tokens: int,
    completion_tokens: int,
    cached_tokens: int | None,
    reasoning_tokens: int | None = None,
    created_cache_tokens: int | None = None,
) -> Usage:
    """The usage from its counts; None: unknown, its details are left out."""
    cached = None
    if cached_tokens is not None:
        cached = PromptTokensDetails(cached_tokens, created_cache_tokens)
    reasoning = None if reasoning_tokens is None else CompletionTokensDetails(reasoning_tokens)
    total = prompt_tokens + completion_tokens
    return Usage(prompt_tokens, total, completion_tokens, cached, reasoning)


def count_usage(prompts: Sequence[Prompt], choices: Sequence[Choice], block_size: int) -> Usage:
    """The usage so far. Each prompt has the same number of choices.

    `block_size`: tokens of a block in the worker's prefix cache; 0: it has none.
    """
    # Only a prompt's first choice counts as cached: the others hit the blocks that it stored.
    cached = [choice.cached_tokens for choice in choices[:: len(choices) // len(prompts)]]
    created = [
        None if not block_size or hit is None else max(0, _in_full_blocks(prompt, block_size) - hit)
        for prompt, hit in zip(prompts, cached, strict=True)
    ]
    return usage_of(
        sum(prompt.num_tokens for prompt in prompts),
        sum(choice.num_tokens for choice in choices),
        _sum_known(cached),
        _sum_known(choice.reasoning_tokens for choice in choices),
        _sum_known(created),
    )


def _in_full_blocks(prompt: Prompt, block_size: int) -> int:
    return prompt.num_tokens - prompt.num_tokens % block_size


def _sum_known(counts: Iterable[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


class _Series:
    """The metric objects of one model on one worker, looked up once.

    A lookup by labels costs more than an observation.
    """

    def __init__(self, metrics: Metrics, model: str, engine: str) -> None:
        labels = {"model_name": model, "engine": engine}
        self._metrics = metrics
        self._labels = labels
        self.first_token = metrics.histogram("time_to_first_token_seconds", **labels)
        self.next_token = metrics.histogram("inter_token_latency_seconds", **labels)
        self.mean_token = metrics.histogram("request_time_per_output_token_seconds", **labels)
        self.whole = metrics.histogram("e2e_request_latency_seconds", **labels)
        self.prompt_tokens = metrics.histogram("request_prompt_tokens", **labels)
        self.generated_tokens = metrics.histogram("request_generation_tokens", **labels)
        self.longest = metrics.histogram("request_max_num_generation_tokens", **labels)
        self.max_tokens = metrics.histogram("request_params_max_tokens", **labels)
        self.n = metrics.histogram("request_params_n", **labels)

    def count_success(self, reason: str) -> None:
        self._metrics.counter("request_success", finished_reason=reason, **self._labels).inc()


class Meters:
    """The request metrics of one gateway process."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._series: OrderedDict[tuple[str, str], _Series] = OrderedDict()

    def start(self, model: str, started_s: float) -> "Meter":
        """Measure a request that arrived at `started_s` (monotonic)."""
        return Meter(self, model, started_s)

    def count_audio(self, model: str, seconds: float) -> None:
        self._metrics.counter("audio_seconds", model_name=model).inc(seconds)

    def series(self, model: str, engine: str) -> _Series:
        """The metric objects of a model on a worker."""
        found = self._series.get((model, engine))
        if found is None:
            found = self._series[model, engine] = _Series(self._metrics, model, engine)
            if len(self._series) > _MAX_SERIES:
                self._series.popitem(last=False)
        return found


class Meter:
    def __init__(self, meters: Meters, model: str, started_s: float) -> None:
        self._meters = meters
        self._model = model
        self._started_s = started_s
        self._first_s: float | None = None
        self._last_s = 0.0
        self._series: _Series | None = None

    def flush(self, prompts: Sequence[Prompt]) -> None:
        """Record that tokens are about to be sent."""
        now = monotonic_s()
        if self._first_s is None or self._series is None:
            self._first_s = now
            self._series = self._meters.series(self._model, prompts[0].worker_id or "")
            self._series.first_token.observe(now - self._started_s)
        else:
            self._series.next_token.observe(now - self._last_s)
        self._last_s = now

    def count_audio(self, seconds: float) -> None:
        """Record the length of a recording that was transcribed."""
        self._meters.count_audio(self._model, seconds)

    def finish(self, prompts: Sequence[Prompt], choices: Sequence[Choice]) -> None:
        """Record that the last byte was sent."""
        series, first_s = self._series, self._first_s
        if series is None or first_s is None:
            return
        series.whole.observe(monotonic_s() - self._started_s)
        series.n.observe(len(choices) // len(prompts))
        for prompt in prompts:
            series.prompt_tokens.observe(prompt.num_tokens)
            series.max_tokens.observe(prompt.max_tokens)
        series.longest.observe(max(choice.num_tokens for choice in choices))
        for choice in choices:
            series.generated_tokens.observe(choice.num_tokens)
            series.count_success(choice.finish_reason or "abort")
            if choice.num_tokens > 1:
                series.mean_token.observe((self._last_s - first_s) / (choice.num_tokens - 1))

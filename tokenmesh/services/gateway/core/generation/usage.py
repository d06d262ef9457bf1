"""Usage: tokens counted for one response. Meters: its latencies and sizes as metrics."""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import msgspec

from tokenmesh.services.gateway.core.context import RequestContext
from tokenmesh.services.gateway.core.generation.choice import Choice
from tokenmesh.services.gateway.core.generation.request import Prompt
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.messages.media import AUDIO, IMAGE, VIDEO
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.telemetry import sampled_trace_id

_NO_MEDIA: Final[Mapping[str, int]] = MappingProxyType({})
_MAX_SERIES: Final = 256
"""Pairs of model and worker whose metric objects are cached."""
_MAX_RECENT: Final = 2048


class PromptTokensDetails(msgspec.Struct, omit_defaults=True):
    """Prompt tokens by where they came from."""

    cached_tokens: int
    created_cache_tokens: int | None = None
    """Tokens of full blocks that this prompt added to the prefix cache; None: unknown."""
    image_tokens: int = 0
    """Tokens that take embeddings of images; OpenAI's names for this and the next two."""
    audio_tokens: int = 0
    video_tokens: int = 0
    multimodal_tokens: dict[str, int] | None = None
    """vLLM's name for the same three, by modality; None: the prompt is text only."""


class CompletionTokensDetails(msgspec.Struct, omit_defaults=True):
    """Generated tokens by what they were used for."""

    reasoning_tokens: int
    accepted_prediction_tokens: int | None = None
    """Tokens that were drafted before they were drawn, a prediction among them; None: no token
    was drafted, and there was no prediction."""
    rejected_prediction_tokens: int | None = None
    """Those that were drafted in vain; they are not among the completion tokens."""


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
    media_tokens: Mapping[str, int] = _NO_MEDIA,
    drafts: tuple[int, int] | None = None,
) -> Usage:
    """The usage from its counts; None: unknown, its details are left out.

    `drafts`: see `Choice.drafts`. `media_tokens`: how many of the prompt tokens stand for media, by
    modality.
    """
    cached = None
    if cached_tokens is not None or media_tokens:
        cached = PromptTokensDetails(
            cached_tokens or 0,
            created_cache_tokens,
            media_tokens.get(IMAGE, 0),
            media_tokens.get(AUDIO, 0),
            media_tokens.get(VIDEO, 0),
            dict(media_tokens) or None,
        )
    details = None if reasoning_tokens is None else CompletionTokensDetails(reasoning_tokens)
    if drafts is not None:
        drafted, accepted = drafts
        details = CompletionTokensDetails(reasoning_tokens or 0, accepted, drafted - accepted)
    total = prompt_tokens + completion_tokens
    return Usage(prompt_tokens, total, completion_tokens, cached, details)


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
        _sum_by_modality(prompts),
        _sum_drafts(prompts, choices),
    )


def _sum_drafts(prompts: Sequence[Prompt], choices: Sequence[Choice]) -> tuple[int, int] | None:
    known = [choice.drafts for choice in choices if choice.drafts is not None]
    if not known and any(prompt.prediction_ids for prompt in prompts):
        return 0, 0  # a client that sends a prediction gets both numbers in any case
    return (sum(d for d, _ in known), sum(a for _, a in known)) if known else None


def _sum_by_modality(prompts: Sequence[Prompt]) -> Mapping[str, int]:
    counts: Counter[str] = Counter()
    for prompt in prompts:
        if prompt.media_tokens:
            counts.update(prompt.media_tokens)
    return counts


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
        self.first_tokens: deque[tuple[float, float]] = deque(maxlen=_MAX_RECENT)
        """When the last responses had their first token (monotonic), and how long that took."""

    def start(self, model: str, context: RequestContext) -> "Meter":
        """Measure a request from its arrival."""
        return Meter(self, model, context)

    def count_audio(self, model: str, seconds: float) -> None:
        self._metrics.counter("audio_seconds", model_name=model).inc(seconds)

    def count_audio_retries(self, model: str, clips: int) -> None:
        self._metrics.counter("audio_retries", model_name=model).inc(clips)

    def series(self, model: str, engine: str) -> _Series:
        """The metric objects of a model on a worker."""
        found = self._series.get((model, engine))
        if found is None:
            found = self._series[model, engine] = _Series(self._metrics, model, engine)
            if len(self._series) > _MAX_SERIES:
                self._series.popitem(last=False)
        return found


class Meter:
    def __init__(self, meters: Meters, model: str, context: RequestContext) -> None:
        self._meters = meters
        self._model = model
        self._context = context
        self._first_s: float | None = None
        self._last_s = 0.0
        self._series: _Series | None = None

    def flush(self, prompts: Sequence[Prompt]) -> None:
        """Record that tokens are about to be sent."""
        now = monotonic_s()
        if self._first_s is None or self._series is None:
            self._first_s = now
            self._series = self._meters.series(self._model, prompts[0].worker_id or "")
            first_s = now - self._context.started_s
            self._series.first_token.observe(first_s, _exemplar())
            self._meters.first_tokens.append((now, first_s))
        else:
            self._series.next_token.observe(now - self._last_s)
        self._last_s = now

    def count_audio(self, seconds: float) -> None:
        """Record the length of a recording that was transcribed."""
        self._meters.count_audio(self._model, seconds)

    def count_audio_retries(self, clips: int) -> None:
        """Record that clips are transcribed again at another temperature."""
        self._meters.count_audio_retries(self._model, clips)

    def finish(self, prompts: Sequence[Prompt], choices: Sequence[Choice]) -> None:
        """Record that the last byte was sent."""
        series, first_s = self._series, self._first_s
        if series is None or first_s is None:
            return
        series.whole.observe(monotonic_s() - self._context.started_s, _exemplar())
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
        context = self._context
        context.input_tokens += sum(prompt.num_tokens for prompt in prompts)
        context.output_tokens += sum(choice.num_tokens for choice in choices)
        context.max_tokens = max(prompt.max_tokens for prompt in prompts)
        context.finish_reasons += [choice.finish_reason or "abort" for choice in choices]


def _exemplar() -> dict[str, str] | None:
    """Return what links an observation to its trace; None where the trace is not recorded."""
    trace_id = sampled_trace_id()
    return None if trace_id is None else {"trace_id": trace_id}

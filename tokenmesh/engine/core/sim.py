"""SimRunner: no model, but the time that one would take and tokens that can be checked.

The token at output position p of a stream depends on its prompt, its adapter, its seed and p, on
nothing else: `sim_token`. So a migrated stream continues with the same tokens, and a reader
detects lost, repeated or foreign tokens. The numbers of a pooled prompt depend on its tokens and
its adapter alone: `sim_pooled`.
"""

import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b, shake_128
from itertools import islice
from math import log, sqrt
from typing import Final

import xxhash

from tokenmesh.engine.adapters.matrices import AdapterMatrices
from tokenmesh.engine.api.pooling import Pooled, PoolingParams
from tokenmesh.engine.api.sampling import SamplingParams
from tokenmesh.engine.api.tokens import TokenLogprobs
from tokenmesh.engine.plan import (
    NewRow,
    ScheduledRow,
    StepPlan,
    StepResult,
)
from tokenmesh.engine.runner import NO_IMAGES, HostImages
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.tokens import pack_ids

_KEY_BYTES: Final = 16
_SEED_MASK: Final = (1 << 64) - 1
_HALF: Final = log(0.5)


@dataclass(frozen=True, slots=True)
class SimVocabulary:
    """It says which ids may be drawn: all but the end-of-sequence ones."""

    size: int
    eos_ids: tuple[int, ...] = ()
    """Ascending."""

    def pick(self, number: int) -> int:
        """One id for any number; every id alike."""
        index = number % max(1, self.size - len(self.eos_ids))
        for eos in self.eos_ids:
            if index >= eos:
                index += 1
        return index % self.size


def prompt_key(prompt_ids: Sequence[int]) -> bytes:
    """Return what `sim_token` needs to know of a prompt."""
    return blake2b(pack_ids(prompt_ids), digest_size=_KEY_BYTES).digest()


def sim_token(
    key: bytes, sampling: SamplingParams, position: int, vocabulary: SimVocabulary
) -> int:
    """The token at an output position.

    xxh3_64 of the key, the seed and the position (8 bytes little-endian each), taken modulo the
    ids that may be drawn: `allowed_token_ids` when set (the way to ask for an end), else the
    vocabulary without its end-of-sequence ids.
    """
    counter = (position << 64 | sampling.seed & _SEED_MASK).to_bytes(16, "little")
    number = xxhash.xxh3_64_intdigest(key + counter)
    allowed = sampling.allowed_token_ids
    return allowed[number % len(allowed)] if allowed else vocabulary.pick(number)


def sim_logprobs(token: int, num_top: int, vocabulary_size: int) -> TokenLogprobs:
    """The token first, with probability 1/2, then its neighbors with 1/4, 1/8, ..."""
    count = min(num_top, vocabulary_size)
    top_ids = [(token + offset) % vocabulary_size for offset in range(count)]
    return TokenLogprobs(token, _HALF, 1, top_ids, [_HALF * (i + 1) for i in range(count)])


def sim_vector(key: bytes, size: int) -> "array[float]":
    """A vector of length 1 that depends on the key and on the size alone."""
    numbers = array("i", shake_128(key).digest(4 * size))
    length = sqrt(sum(number * number for number in numbers)) or 1.0
    return array("f", (number / length for number in numbers))


def sim_pooled(
    token_ids: Sequence[int],
    params: PoolingParams,
    size: int,
    num_labels: int,
    adapter: AdapterMatrices | None = None,
) -> Pooled:
    """The numbers of a prompt: of each of its tokens where the task answers per token.

    Embeddings are unit vectors, of which `dimensions` keeps the first ones, made unit vectors
    again. The scores of labels add up to 1; a single one is its share of two.
    """
    keys = [prompt_key(token_ids)]
    if params.task in ("token_embed", "token_classify"):
        keys = [prompt_key(place) for place in enumerate(token_ids)]
    if adapter is not None:
        keys = [key + adapter.content_hash.encode() for key in keys]
    if params.task in ("classify", "score", "token_classify"):
        rows = [_shares(sim_vector(key, max(2, num_labels)))[:num_labels] for key in keys]
    else:
        rows = [_shortened(sim_vector(key, size), params.dimensions or size) for key in keys]
    shape = [len(rows[0])] if len(rows) == 1 and "token" not in params.task else []
    numbers = array("f", (number for row in rows for number in row))
    if sys.byteorder == "big":
        numbers.byteswap()
    return Pooled(shape or [len(rows), len(rows[0])], numbers.tobytes())


def _shares(vector: "array[float]") -> "array[float]":
    return array("f", (number * number for number in vector))


def _shortened(vector: "array[float]", size: int) -> "array[float]":
    length = sqrt(sum(number * number for number in vector[:size])) or 1.0
    return array("f", (number / length for number in vector[:size]))


@dataclass(slots=True)
class _SimRow:
    new: NewRow
    key: bytes
    num_known: int


class SimLaunch:
    """Implements `Launch`: the result is known at once and kept back until the step's time."""

    def __init__(self, result: StepResult, end_s: float, wait: Callable[[float], object]) -> None:
        self._result = result
        self._end_s = end_s
        self._wait = wait

    def wait(self, timeout_s: float) -> bool:
        rest_s = self._end_s - monotonic_s()
        if min(rest_s, timeout_s) > 0:
            self._wait(min(rest_s, timeout_s))
        return rest_s <= timeout_s

    def result(self) -> StepResult:
        rest_s = self._end_s - monotonic_s()
        if rest_s > 0:
            self._wait(rest_s)
        return self._result


class SimRunner:
    """Implements `Runner`. A step begins when it is launched and the one before it has left the
    first stage; all stages take equally long."""

    def __init__(
        self,
        vocabulary: SimVocabulary,
        settings: WorkerSettings,
        wait: Callable[[float], object],
        pooled_size: int = 0,
        num_labels: int = 0,
        images: HostImages = NO_IMAGES,
    ) -> None:
        """pooled_size: width of an embedding. num_labels: of a classifier. images: what blocks are
        said to be copied to; nothing is written there."""
        self.windows: tuple[int | None, ...] = (None,)
        self.has_states = False
        self.has_pages = True
        self.num_saved_states = 0
        self.takes_drafts = True
        self.max_proposed = 0
        self.images = images
        self.has_own_device = True
        self.num_lanes = settings.pipeline_parallel_size
        self.num_blocks = settings.num_gpu_blocks_override or settings.sim_num_blocks
        self._vocabulary = vocabulary
        self._settings = settings
        self._wait = wait
        self._size = pooled_size
        self._num_labels = num_labels
        self._rows: dict[int, _SimRow] = {}
        self._ends_s = [0.0] * self.num_lanes
        """When each stage has ended the steps launched so far, on `monotonic_s`."""

    def launch(self, plan: StepPlan) -> SimLaunch:
        duration_s = step_seconds(plan, self._settings) * self._settings.sim_time_scale
        end_s, each_s = monotonic_s(), duration_s / self.num_lanes
        for stage, busy_until_s in enumerate(self._ends_s):
            end_s = self._ends_s[stage] = max(end_s, busy_until_s) + each_s
        return SimLaunch(self._carry_out(plan), end_s, self._wait)

    def _carry_out(self, plan: StepPlan) -> StepResult:
        for number in plan.removed_rows:
            self._rows.pop(number, None)
        for new in plan.new_rows:
            key = prompt_key(new.token_ids[: new.num_prompt])
            if new.adapter is not None:
                key += new.adapter.content_hash.encode()
            self._rows[new.row] = _SimRow(new, key, len(new.token_ids))
        result = StepResult()
        for number in plan.decodes:
            self._draw(number, [], result)
        for entry in plan.scheduled:
            row = self._rows[entry.row]
            if row.new.wants_prompt_logprobs:
                result.prompt_logprobs[entry.row] = self._prompt_logprobs(row, entry)
            if entry.pools and row.new.pooling is not None:
                result.pooled[entry.row] = sim_pooled(
                    row.new.token_ids,
                    row.new.pooling,
                    self._size,
                    self._num_labels,
                    row.new.adapter,
                )
            if entry.samples:
                self._draw(entry.row, entry.drafts, result)
        return result

    def _draw(self, number: int, drafts: Sequence[int], result: StepResult) -> None:
        """A token, and one more after each draft that is right."""
        row = self._rows[number]
        sampling = row.new.sampling
        tokens = result.tokens[number] = []
        for draft in (*drafts, None):
            position = row.num_known - row.new.num_prompt
            tokens.append(sim_token(row.key, sampling, position, self._vocabulary))
            row.num_known += 1
            if tokens[-1] != draft:
                break
        if sampling.logprobs is not None:
            result.logprobs[number] = [self._logprobs(sampling, token) for token in tokens]

    def _logprobs(self, sampling: SamplingParams, token: int) -> TokenLogprobs:
        named = sampling.logprob_token_ids
        if not named:
            return sim_logprobs(token, sampling.logprobs or 0, self._vocabulary.size)
        values = [_HALF if each == token else 2 * _HALF for each in named]
        return TokenLogprobs(token, _HALF, 1, named, values)

    def _prompt_logprobs(self, row: _SimRow, entry: ScheduledRow) -> list[TokenLogprobs]:
        num_top = row.new.sampling.prompt_logprobs or 0
        stop = min(entry.start + entry.num_tokens + 1, row.new.num_prompt)
        tokens = islice(row.new.token_ids, entry.start + 1, stop)
        return [sim_logprobs(token, num_top, self._vocabulary.size) for token in tokens]


def step_seconds(plan: StepPlan, settings: WorkerSettings) -> float:
    """The timing model: a fixed part, a part for each stream, and prefill at a fixed rate."""
    num_streams = plan.num_rows
    num_decode = len(plan.decodes) + sum(entry.num_tokens == 1 for entry in plan.scheduled)
    return (
        settings.sim_step_s
        + settings.sim_seq_s * num_streams
        + (plan.num_tokens - num_decode) / settings.sim_prefill_tokens_per_s
    )

"""Batch: a plan's rows in the order in which the device computes them. Numbers of the host only."""

from dataclasses import dataclass, field

from tokenmesh.engine.exec.cuda.rows import CudaRows, DeviceRow
from tokenmesh.engine.exec.cuda.step_buffer import StepBuffer, fill
from tokenmesh.engine.exec.media import step_media
from tokenmesh.engine.layers.step import NO_MEDIA, Patch, StepMedia
from tokenmesh.engine.plan import ScheduledRow
from tokenmesh.kernels.lora import DeviceAdapterRows, LoraWeights

_PADDING = -1
_NO_DRAW = -1


@dataclass(frozen=True, slots=True)
class DevicePromptSpan:
    """Tokens of the batch whose next token is one of a prompt's, with wanted log-probabilities."""

    row: int
    tokens: slice
    first: int
    """Position of the first target."""
    targets: list[int]
    count: int
    """Alternatives to report at each position."""


@dataclass(slots=True)
class Batch:
    """Rows of one token first, then longer chunks."""

    entries: list[ScheduledRow]
    num_short: int
    num_tokens: int = 0
    sampled: list[int] = field(default_factory=list)
    """Numbers of the rows that draw."""
    draws: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    last_tokens: list[int] = field(default_factory=list)
    query_starts: list[int] = field(default_factory=lambda: [0])
    patches: list[Patch] = field(default_factory=list)
    spans: list[DevicePromptSpan] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)
    adapters: list[LoraWeights | None] = field(default_factory=list)
    """These are the adapters of each row; empty where no row has one."""
    adapter_rows: DeviceAdapterRows | None = None
    """The same on the device."""
    media: StepMedia = NO_MEDIA
    """In the host's memory, but for the patches."""

    @property
    def is_plain_decode(self) -> bool:
        """One token in and one out for every row: what graphs are recorded of."""
        is_plain = not self.patches and not self.adapters and self.media.positions is None
        return len(self.sampled) == self.num_tokens and is_plain

    @property
    def longest_short(self) -> int:
        """Keys of the longest row of one token."""
        return max((entry.start + 1 for entry in self.entries[: self.num_short]), default=1)

    def write(self, upload: StepBuffer, num_padded: int) -> None:
        """Fill the host's buffer; rows beyond the last, up to `num_padded`, are padding."""
        padding = [_PADDING] * (num_padded - len(self.entries))
        fill(upload.rows, [entry.row for entry in self.entries] + padding)
        fill(upload.sampled_rows, self.sampled)
        fill(upload.draws, self.draws)
        fill(upload.positions, self.positions)
        fill(upload.last_tokens, self.last_tokens)
        fill(upload.query_starts, self.query_starts)


def make_batch(scheduled: list[ScheduledRow], rows: CudaRows) -> Batch:
    """Put a plan in order."""
    entries = sorted(scheduled, key=lambda entry: entry.num_tokens > 1)
    batch = Batch(entries, num_short=sum(entry.num_tokens == 1 for entry in entries))
    for entry in entries:
        _append(batch, entry, rows)
    if rows.adapters:
        batch.adapters = [rows[entry.row].adapter for entry in entries]
    known = [rows[entry.row] for entry in entries]
    if any(row.positions is not None or row.whole_runs or row.patches for row in known):
        places = zip(known, entries, strict=True)
        batch.media = _media_of([(r, e.start, e.num_tokens) for r, e in places], rows, batch)
    return batch


def _media_of(entries: list[tuple[DeviceRow, int, int]], rows: CudaRows, batch: Batch) -> StepMedia:
    """Rows of positions only where one of the batch has some that do not count from 0."""
    has_positions = any(row.positions is not None for row, _, _ in entries)
    return step_media(entries, rows.position_rows if has_positions else 1, batch.patches)


def _append(batch: Batch, entry: ScheduledRow, rows: CudaRows) -> None:
    row, first, end = rows[entry.row], batch.num_tokens, entry.start + entry.num_tokens
    batch.num_tokens += entry.num_tokens
    batch.query_starts.append(batch.num_tokens)
    draws = row.error is None and entry.samples
    batch.draws.append(len(batch.sampled) if draws else _NO_DRAW)
    if row.error is not None:
        batch.errors[entry.row] = row.error
    if draws:
        batch.sampled.append(entry.row)
        batch.positions.append(end - row.num_prompt)
        batch.last_tokens.append(batch.num_tokens - 1)
    found = (patch.within(entry.start, end, first) for patch in row.patches)
    batch.patches += [patch for patch in found if patch is not None]
    targets = row.prompt[entry.start + 1 : end + 1]
    if targets:
        tokens = slice(first, first + len(targets))
        span = DevicePromptSpan(
            entry.row, tokens, entry.start + 1, targets, row.num_prompt_logprobs
        )
        batch.spans.append(span)

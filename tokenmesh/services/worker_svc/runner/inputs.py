"""StepInputs: a plan turned into the tensors that the model reads.

Batch order: rows of one token first, shortest first, then longer chunks. Results name their rows,
so the order is nobody else's business.
"""

from dataclasses import dataclass

import torch

from tokenmesh.services.worker_svc.engine.plan import ScheduledRow
from tokenmesh.services.worker_svc.layers.step import HostStep
from tokenmesh.services.worker_svc.models.api import Patch
from tokenmesh.services.worker_svc.runner.rows import Rows


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Positions of one row whose next prompt token's log-probability is wanted."""

    row: int
    tokens: slice
    """Batch tokens, the last of which predicts the last entry of `targets`."""
    targets: list[int]
    count: int
    """Alternatives to report at each position."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Everything one step needs. T tokens, N sampled rows."""

    token_ids: torch.Tensor
    """[T] int64"""
    patches: list[Patch]
    step: HostStep
    sampled_rows: list[int]
    last_tokens: torch.Tensor | None
    """[N] batch token whose logits each sampled row draws from; None: each token has its row."""
    prompt_spans: list[PromptSpan]
    errors: dict[int, str]


def build_inputs(scheduled: list[ScheduledRow], rows: Rows, page_size: int) -> StepInputs:
    """Gather inputs for at least one scheduled row."""
    order = sorted(scheduled, key=_batch_key)
    token_ids: list[int] = []
    lengths: list[int] = []
    patches, sampled_rows, last_tokens, spans, errors = [], [], [], [], {}
    for entry in order:
        row, first = rows[entry.row], len(token_ids)
        end = entry.start + entry.num_tokens
        token_ids += row.token_ids[entry.start : end]
        lengths += [max(row.min_length, p + 1) for p in range(entry.start, end)]
        for patch in row.patches:
            overlap = patch.overlap(entry.start, end)
            if overlap is not None:
                where = slice(first + overlap[0].start, first + overlap[0].stop)
                patches.append((where, overlap[1]))
        if row.error is not None:
            errors[entry.row] = row.error
        elif entry.samples:
            sampled_rows.append(entry.row)
            last_tokens.append(len(token_ids) - 1)
        if row.prompt_logprobs is not None and entry.start + 1 < row.num_prompt:
            targets = row.token_ids[entry.start + 1 : min(end + 1, row.num_prompt)]
            spans.append(
                PromptSpan(
                    entry.row, slice(first, first + len(targets)), targets, row.prompt_logprobs
                )
            )
    is_whole = len(last_tokens) == len(token_ids)
    return StepInputs(
        token_ids=torch.tensor(token_ids),
        patches=patches,
        step=HostStep(
            starts=[entry.start for entry in order],
            counts=[entry.num_tokens for entry in order],
            numbers=[entry.row for entry in order],
            all_tables=rows.tables,
            page_size=page_size,
            token_lengths=lengths,
            windowed_tables=rows.windowed_tables,
        ),
        sampled_rows=sampled_rows,
        last_tokens=None if is_whole else torch.tensor(last_tokens, dtype=torch.int64),
        prompt_spans=spans,
        errors=errors,
    )


def _batch_key(entry: ScheduledRow) -> tuple[bool, int]:
    return (entry.num_tokens > 1, entry.start)

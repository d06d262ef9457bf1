"""StepInputs: a plan turned into the tensors that the model reads.

Batch order: rows of one token first, shortest first, then longer chunks. Results name their rows,
so no other module depends on the order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tokenmesh.engine.exec.branches import table_of
from tokenmesh.engine.exec.media import step_media
from tokenmesh.engine.exec.rows import HostRows
from tokenmesh.engine.layers.step import NO_MEDIA, HostStep, Patch, StepMedia
from tokenmesh.engine.plan import ScheduledRow
from tokenmesh.engine.sampling.logprobs import PromptSpan
from tokenmesh.engine.sampling.sampler import Drafted
from tokenmesh.kernels.lora import AdapterRows


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Everything one step needs. T tokens, N sampled rows, D drafts."""

    token_ids: torch.Tensor
    """[T] int64"""
    patches: list[Patch]
    step: HostStep
    sampled_rows: list[int]
    last_tokens: torch.Tensor | None
    """[N + D] batch token whose logits each sampled row draws from, then those of the drafts; None:
    each token has its row."""
    drafted: list[Drafted]
    prompt_spans: list[PromptSpan]
    errors: dict[int, str]


def build_inputs(scheduled: list[ScheduledRow], rows: HostRows, page_size: int) -> StepInputs:
    """Gather inputs for at least one scheduled row."""
    order = sorted(scheduled, key=_batch_key)
    token_ids: list[int] = []
    lengths: list[int] = []
    patches: list[Patch] = []
    sampled_rows, last_tokens, spans, errors = [], [], [], {}
    drafts: list[tuple[int, list[int], int]] = []
    for entry in order:
        row, first = rows[entry.row], len(token_ids)
        end = entry.start + entry.num_tokens
        token_ids += row.token_ids[entry.start : end]
        if entry.drafts:
            drafts.append((entry.row, entry.drafts, len(token_ids)))
            token_ids += entry.drafts
        lengths += [max(row.min_length, p + 1) for p in range(entry.start, end + len(entry.drafts))]
        found = (patch.within(entry.start, end, first) for patch in row.patches)
        patches += [patch for patch in found if patch is not None]
        if row.error is not None:
            errors[entry.row] = row.error
        elif entry.samples:
            sampled_rows.append(entry.row)
            last_tokens.append(first + entry.num_tokens - 1)
        if row.prompt_logprobs is not None and entry.start + 1 < row.num_prompt:
            targets = row.token_ids[entry.start + 1 : min(end + 1, row.num_prompt)]
            tokens = slice(first, first + len(targets))
            spans.append(PromptSpan(entry.row, tokens, targets, row.prompt_logprobs))
    is_whole = len(last_tokens) == len(token_ids)
    drafted = _place_drafts(drafts, last_tokens)
    return StepInputs(
        token_ids=torch.tensor(token_ids),
        patches=patches,
        step=HostStep(
            starts=[entry.start for entry in order],
            counts=[entry.num_tokens + len(entry.drafts) for entry in order],
            numbers=[table_of(entry) for entry in order],
            all_tables=rows.tables,
            page_size=page_size,
            token_lengths=lengths,
            windowed_tables=rows.windowed_tables,
            media=_media_of(order, rows, patches),
            adapters=adapter_rows(order, rows),
        ),
        sampled_rows=sampled_rows,
        last_tokens=None if is_whole else torch.tensor(last_tokens, dtype=torch.int64),
        drafted=drafted,
        prompt_spans=spans,
        errors=errors,
    )


def _media_of(order: list[ScheduledRow], rows: HostRows, patches: list[Patch]) -> StepMedia:
    if not rows.has_media_steps:
        return NO_MEDIA
    entries = [(rows[e.row], e.start, e.num_tokens + len(e.drafts)) for e in order]
    return step_media(entries, rows.position_rows, patches)


def adapter_rows(order: Sequence[ScheduledRow], rows: HostRows) -> AdapterRows | None:
    """The tokens of a step, in batch order, that have adapters; None: none has."""
    if not rows.num_adapted:
        return None
    return AdapterRows.of(
        [(rows[each.row].adapter, each.num_tokens + len(each.drafts)) for each in order]
    )


def _place_drafts(
    drafts: list[tuple[int, list[int], int]], last_tokens: list[int]
) -> list[Drafted]:
    """Append the batch tokens of drafts, each given with its row and the first one's token."""
    drafted = []
    for row, token_ids, token in drafts:
        drafted.append(Drafted(row, token_ids, len(last_tokens)))
        last_tokens += range(token, token + len(token_ids))
    return drafted


def _batch_key(entry: ScheduledRow) -> tuple[bool, int]:
    return (entry.num_tokens + len(entry.drafts) > 1, entry.start)

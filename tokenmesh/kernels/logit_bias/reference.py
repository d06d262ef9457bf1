"""The specification of logit_bias, a row and a token at a time."""

import torch

from tokenmesh.kernels.logit_bias.rows import LimitRows
from tokenmesh.kernels.sample.rows import HID_DEFECT, HID_NUMBER


def logit_bias_reference(
    logits: torch.Tensor, idx_mapping: torch.Tensor, positions: torch.Tensor, rows: LimitRows
) -> torch.Tensor:
    """See the package. Changes logits; -> marks int32 [N]."""
    marks = torch.zeros(len(idx_mapping), dtype=torch.int32, device=logits.device)
    for index, row in enumerate(idx_mapping.tolist()):
        slot = int(rows.slot[row]) if row >= 0 else -1
        if slot >= 0:
            marks[index] = _change(logits[index], int(positions[index]), rows, slot)
    return marks


def record_reference(
    tokens: torch.Tensor, flaws: torch.Tensor, idx_mapping: torch.Tensor, rows: LimitRows
) -> None:
    for index, row in enumerate(idx_mapping.tolist()):
        slot = int(rows.slot[row]) if row >= 0 else -1
        if slot >= 0 and int(flaws[index]) == 0:
            recent = rows.recent[slot]
            recent.copy_(torch.cat([tokens[index : index + 1].int(), recent])[: len(recent)])


def _change(logits_V: torch.Tensor, position: int, rows: LimitRows, slot: int) -> int:
    before_V = logits_V.clone()
    forbidden_V = torch.zeros_like(logits_V, dtype=torch.bool)
    if int(rows.has_allowed[slot]):
        ids = torch.arange(len(logits_V), device=logits_V.device)
        forbidden_V |= (rows.allowed[slot][ids // 32] >> (ids % 32)) & 1 == 0
    for edit in range(int(rows.num_edits[slot])):
        token = int(rows.edit_ids[slot, edit])
        logits_V[token] += rows.edit_bias[slot, edit]
        if int(rows.edit_is_stop[slot, edit]) and position < int(rows.min_tokens[slot]):
            forbidden_V[token] = True
    for token in _banned(rows, slot):
        forbidden_V[token] = True
    logits_V[forbidden_V] = float("-inf")
    hidden = before_V[forbidden_V]
    has_defect = bool((hidden.isnan() | (hidden == float("inf"))).any())
    return HID_DEFECT * has_defect + HID_NUMBER * bool(hidden.isfinite().any())


def _banned(rows: LimitRows, slot: int) -> list[int]:
    """Last tokens of the bad words whose other tokens were just generated."""
    recent = rows.recent[slot].tolist()
    tokens = rows.word_tokens[slot].tolist()
    begin, banned = 0, []
    for end in rows.word_ends[slot, : int(rows.num_words[slot])].tolist():
        *head, last = tokens[begin:end]
        if recent[: len(head)] == head[::-1]:
            banned.append(last)
        begin = end
    return banned

"""The specification of sample: one row at a time, by sorting, in float64 where sums are made."""

import torch

from tokenmesh.kernels.exponential_noise.cpu import exponential_noise
from tokenmesh.kernels.sample.rows import (
    HID_DEFECT,
    HID_NUMBER,
    NOT_FINITE,
    NOTHING_ALLOWED,
    SOUND,
    ChoiceRows,
)


def sample_reference(
    logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    positions: torch.Tensor,
    rows: ChoiceRows,
    marks: torch.Tensor | None = None,
) -> torch.Tensor:
    """See the package. -> int64 [2, N]: tokens and flaws."""
    out = torch.zeros(2, logits.shape[0], dtype=torch.int64, device=logits.device)
    for index, row in enumerate(idx_mapping.tolist()):
        if row < 0:
            continue
        mark = 0 if marks is None else int(marks[index])
        flaw = _flaw(logits[index], mark)
        out[1, index] = flaw
        if flaw == SOUND:
            out[0, index] = _token(logits[index].float(), rows, row, positions[index])
    return out


def _flaw(logits_V: torch.Tensor, mark: int) -> int:
    best = float(logits_V.max())
    if mark & HID_DEFECT or best != best or best == float("inf"):
        return NOT_FINITE
    if best == float("-inf"):
        return NOTHING_ALLOWED if mark & HID_NUMBER else NOT_FINITE
    return SOUND


def _token(logits_V: torch.Tensor, rows: ChoiceRows, row: int, position: torch.Tensor) -> int:
    temperature = rows.temperature[row]
    if float(temperature) == 0.0:
        return int((logits_V == logits_V.max()).nonzero()[0])
    scaled_V = logits_V / temperature
    weights_V = (scaled_V - scaled_V.max()).exp()
    floor = _floor(weights_V, float(rows.min_p[row]), int(rows.top_k[row]), float(rows.top_p[row]))
    seed = rows.seed[row].view(1).cpu()
    noise_V = exponential_noise(seed, position.view(1).cpu(), len(logits_V))[0]
    return int((weights_V * (weights_V >= floor) / noise_V.to(weights_V.device)).argmax())


def _floor(weights_V: torch.Tensor, min_p: float, top_k: int, top_p: float) -> float:
    """The smallest weight that min_p, top_k and top_p keep, in this order; equal weights stay."""
    sorted_V = weights_V.sort(descending=True).values
    floor = min_p
    if 0 < top_k < len(sorted_V):
        floor = max(floor, float(sorted_V[top_k - 1]))
    if top_p < 1.0:
        kept_V = sorted_V[sorted_V >= floor].double()
        before_V = kept_V.cumsum(0) - kept_V
        num_within = max(1, int((before_V < top_p * kept_V.sum()).sum()))
        floor = max(floor, float(kept_V[num_within - 1]))
    return floor

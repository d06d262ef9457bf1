"""A loaded tree is compared with itself as transformers runs it, before it serves anybody.

Module trees may mix tokens in ways that no probe sees. Two prompts, cut into chunks and batched,
over shuffled blocks full of NaN, have to come out as each does alone and whole.
"""

from collections.abc import Callable
from typing import Final

import torch
from transformers import PreTrainedModel

from tokenmesh.services.worker_svc.layers.device_step import on_device
from tokenmesh.services.worker_svc.layers.step import HostStep, Step
from tokenmesh.services.worker_svc.models.api import Model
from tokenmesh.services.worker_svc.models.hf.unserved import UnservedModel
from tokenmesh.services.worker_svc.models.keeps import KvStore, make_store

TOLERANCE: Final = {torch.float32: 2e-3}
"""Largest relative error of all logits. In half precision a route may flip, so it is wider."""
HALF_TOLERANCE: Final = 0.2
_PAGE: Final = 4
_LENGTHS: Final = (23, 14)
_CUTS: Final = ((0, 9, 10, 17, 22, 23), (0, 5, 6, 12, 13, 14))
"""Where each prompt's chunks end; the fifth step has one token of each."""
_TABLES: Final = ((7, 2, 11, 4, 9, 1), (3, 10, 5, 8, 0, 0))
_NUM_BLOCKS: Final = 12

Forward = Callable[[torch.Tensor, Step, KvStore], torch.Tensor]


def prompts(vocab_size: int, device: torch.device) -> list[torch.Tensor]:
    """Two of random tokens, the same on every device."""
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(vocab_size, (length,), generator=generator) for length in _LENGTHS]
    return [each.to(device) for each in ids]


@torch.inference_mode()
def reference(model: PreTrainedModel, vocab_size: int) -> torch.Tensor:
    """float32 [tokens, V] by transformers' own code; call it before the tree is adapted."""
    given = prompts(vocab_size, model.device)
    each = [model(input_ids=ids[None], use_cache=False).logits[0] for ids in given]
    return torch.cat(each).float()


def check(expected: torch.Tensor, ours: torch.Tensor, dtype: torch.dtype) -> float:
    """The relative error; raises UnservedModel where it is too large."""
    error = float((ours - expected).norm() / expected.norm())
    limit = TOLERANCE.get(dtype, HALF_TOLERANCE)
    if not error <= limit:
        raise UnservedModel(
            f"in chunks and batched its logits are {error:.2g} away from those of the whole prompt"
        )
    return error


@torch.inference_mode()
def paged_logits(forward: Forward, model: Model, device: torch.device) -> torch.Tensor:
    """float32 [tokens, V] of the same prompts over a store; forward: ids, step, store -> logits."""
    grouping, vocab_size = model.grouping, model.facts.vocab_size
    num_blocks = _NUM_BLOCKS * len(grouping.windows)
    store = make_store(model.keeps, num_blocks, _PAGE, len(_LENGTHS), model.dtype, device, grouping)
    for tensor in store.tensors:
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
    for row in range(len(_LENGTHS)):
        store.clear_row(row)
    ids, tables = prompts(vocab_size, device), torch.tensor(_TABLES)
    windowed = [tables + _NUM_BLOCKS * group for group in range(1, len(grouping.windows))]
    found: list[list[torch.Tensor]] = [[], []]
    for index in range(len(_CUTS[0]) - 1):
        spans = [(row, _CUTS[row][index], _CUTS[row][index + 1]) for row in (1, 0)]
        spans.sort(key=lambda span: span[2] - span[1] > 1)
        step = HostStep(
            starts=[start for _, start, _ in spans],
            counts=[end - start for _, start, end in spans],
            numbers=[row for row, _, _ in spans],
            all_tables=tables,
            page_size=_PAGE,
            token_lengths=[p + 1 for _, start, end in spans for p in range(start, end)],
            windowed_tables=windowed,
        )
        tokens = torch.cat([ids[row][start:end] for row, start, end in spans])
        logits = forward(tokens, on_device(step, device), store)
        pieces = torch.split(logits, list(step.counts))
        for (row, _, _), piece in zip(spans, pieces, strict=True):
            found[row].append(piece)
    return torch.cat([piece for row in found for piece in row]).float()

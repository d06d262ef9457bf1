"""A loaded tree is compared with itself as transformers runs it, before it serves requests.

Module trees may mix tokens in ways that no probe sees. Two prompts, cut into chunks and batched,
over shuffled blocks full of NaN, have to come out as each does alone and whole.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from tokenmesh.engine.layers.device_step import on_device
from tokenmesh.engine.layers.step import HostStep, Step
from tokenmesh.engine.models.api import LanguageModel
from tokenmesh.engine.models.kv_store import KvStore, make_store
from tokenmesh.engine.models.tree.embedding_factor import NEEDS_IDS
from tokenmesh.engine.models.tree.run import UnservedModel
from tokenmesh.engine.ranks.ranks import ALONE, Ranks

TOLERANCE: Final = 2e-3
"""Largest relative error of all logits in float32."""
HALF_TOLERANCE: Final = 0.2
"""In half precision a route may flip, so it is wider; and where transformers' own logits move by
more when embeddings are rounded differently, it is so many times as much:"""
_TIMES_OWN: Final = 3.0
_SAME: Final = 0.02
"""Between two runs of the same code in half precision, which some kernels of a GPU round apart."""
_MOST: Final = 0.8
"""Logits of another function are 1 away and more."""
_PAGE: Final = 4
_LENGTHS: Final = (23, 14)
_CUTS: Final = ((0, 9, 10, 17, 22, 23), (0, 5, 6, 12, 13, 14))
"""Where each prompt's chunks end; the fifth step has one token of each."""
_TABLES: Final = ((7, 2, 11, 4, 9, 1), (3, 10, 5, 8, 0, 0))
_NUM_BLOCKS: Final = 12

_OF_INDEXERS: Final = (
    "; its indexer may score tokens equally, and which of such ties are among its index_topk "
    "depends on how a prompt is cut, also in transformers"
)

Compute = Callable[[torch.Tensor, Step, KvStore], torch.Tensor]
"""Token ids [T], their step and a store -> results for each of them."""


def prompts(vocab_size: int, device: torch.device) -> list[torch.Tensor]:
    """Two of random tokens, the same on every device."""
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(vocab_size, (length,), generator=generator) for length in _LENGTHS]
    return [each.to(device) for each in ids]


@dataclass(frozen=True, slots=True)
class Reference:
    """It holds what transformers' own code computes from whole prompts."""

    results: torch.Tensor
    """float32 [tokens, V] logits, or [tokens, H] states"""
    limit: float
    """The largest relative error of ours."""
    what: str = "logits"


@torch.inference_mode()
def reference(
    model: PreTrainedModel,
    vocab_size: int,
    states: Sequence[torch.Tensor] = (),
    factor: float = 1.0,
    ranks: Ranks = ALONE,
) -> Reference:
    """Call it before the tree is adapted. states: of an encoder, for each prompt; factor: see
    `embedding_factor`; ranks: of which the model is a part.

    Raises UnservedModel for a model in half precision that needs token ids as well as
    embeddings: what leaving them out changes may be less than what rounding does.
    """
    given = prompts(vocab_size, model.device)

    def logits() -> torch.Tensor:
        encoded = [{"encoder_outputs": (each[None],)} for each in states] or [{}] * len(given)
        each = [
            model(input_ids=ids[None], use_cache=False, **more).logits[0]
            for ids, more in zip(given, encoded, strict=True)
        ]
        return ranks.gather_on_all(torch.cat(each).float(), vocab_size)

    expected = logits()
    if model.dtype == torch.float32:
        return Reference(expected, TOLERANCE)
    embedding: Any = model.get_input_embeddings()
    ids = given[-1]
    rows, own_part = embedding(ids) * factor, ranks.padded_part(vocab_size)
    if not states and not _is_near(model, rows, expected[-len(ids) :, own_part], ranks):
        raise UnservedModel(NEEDS_IDS)
    hook = embedding.register_forward_hook(lambda _module, _ids, rows: _rounded_anew(rows))
    try:
        own = _distance(logits(), expected)
    finally:
        hook.remove()
    return Reference(expected, min(_MOST, max(HALF_TOLERANCE, _TIMES_OWN * own)))


def _is_near(
    model: PreTrainedModel, rows: torch.Tensor, expected: torch.Tensor, ranks: Ranks
) -> bool:
    """Embeddings [T, H] alone yield the logits of their tokens, on all ranks."""
    try:
        alone = model(inputs_embeds=rows[None], use_cache=False).logits[0]
    except Exception:  # whatever the code around a body raises without ids; only the body runs here
        return True
    return ranks.agree(_distance(alone.float(), expected) < _SAME)


def _rounded_anew(rows: torch.Tensor) -> torch.Tensor:
    """Each number moved by about half a unit in its last place, the same in every call."""
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(2, rows.shape, generator=generator).to(rows.device) * 2 - 1
    return (rows.float() * (1 + signs * torch.finfo(rows.dtype).eps / 2)).to(rows.dtype)


def _distance(ours: torch.Tensor, expected: torch.Tensor) -> float:
    return float((ours - expected).norm() / expected.norm())


def check(
    expected: Reference, ours: torch.Tensor, has_indexers: bool = False, ranks: Ranks = ALONE
) -> float:
    """The relative error; raises UnservedModel where it is too large, on all ranks.

    Ranks that follow have no results, and take the leader's word."""
    error = _distance(ours, expected.results) if ranks.leads else 0.0
    if not ranks.agree(error <= expected.limit):
        raise UnservedModel(
            f"in chunks and batched its {expected.what} are {error:.2g} away from those of the "
            f"whole prompt, and more than {expected.limit:.2g} is not rounding"
            f"{_OF_INDEXERS if has_indexers else ''}"
        )
    return error


@torch.inference_mode()
def paged_results(
    compute: Compute,
    model: LanguageModel,
    device: torch.device,
    states: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """float32 [tokens, *]: results for the same prompts over a store."""
    grouping, vocab_size = model.grouping, model.facts.vocab_size
    num_blocks = _NUM_BLOCKS * len(grouping.windows)
    store = make_store(model.keeps, num_blocks, _PAGE, len(_LENGTHS), model.dtype, device, grouping)
    for tensor in store.tensors:
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
    for row in range(len(_LENGTHS)):
        store.clear_row(row)
        if model.write_cross is not None:
            model.write_cross(states[row], store, row)
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
        results = compute(tokens, on_device(step, device), store)
        pieces = torch.split(results, list(step.counts))
        for (row, _, _), piece in zip(spans, pieces, strict=True):
            found[row].append(piece)
    return torch.cat([piece for row in found for piece in row]).float()

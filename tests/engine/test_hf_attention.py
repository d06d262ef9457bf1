"""The general kind's attention in C against the same in torch."""

import pytest
import torch

from tests.ops.native import needs_native, way
from tokenmesh.engine.layers.step import HostStep
from tokenmesh.engine.models.keeps import Pages
from tokenmesh.engine.models.kv_store import make_store
from tokenmesh.engine.models.tree import attention
from tokenmesh.engine.models.tree.attention import Port
from tokenmesh.engine.models.tree.run import ModulePlace, Run

pytestmark = needs_native
PAGE, BLOCKS = 8, 24
STEPS = {
    "prompts": ([0, 0], [19, 7]),
    "mixed": ([19, 7], [1, 5]),
    "decode": ([20, 12], [1, 1]),
}
"""Starts and counts of two rows, one step after the other."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def step_of(starts: list[int], counts: list[int]) -> HostStep:
    lengths = [s + i + 1 for s, n in zip(starts, counts, strict=True) for i in range(n)]
    tables = torch.tensor([[4, 9, 2, 0], [7, 1, 12, 0], [3, 15, 5, 0]])
    # row 1 is another request's
    return HostStep(starts, counts, [2, 0], tables, PAGE, lengths, [tables + 8])


def outputs(
    native: bool,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None = None,
) -> tuple[list[torch.Tensor], torch.Tensor, Run]:
    """Return the outputs of all steps, the pages after them, and the run."""
    torch.manual_seed(0)
    heads, kv_heads, dim = shape
    store = make_store(
        [(Pages(kv_heads, dim, dim, window),)], BLOCKS, PAGE, 3, dtype, torch.device("cpu")
    )
    (pages,) = store.layers[0]
    pages.fill_(torch.nan)
    port = Port(ModulePlace(Run(), 0, 0), window, softcap, has_sinks=False, value_dim=dim)
    found = []
    with way(attention, native):
        for starts, counts in STEPS.values():
            port.place.run.begin(step_of(starts, counts), store)
            query, key, value = (
                torch.randn(1, sum(counts), n, dim).to(dtype).transpose(1, 2)
                for n in (heads, kv_heads, kv_heads)
            )
            mixed = port.attend(query, key, value, dim**-0.5, None)
            found.append(mixed.reshape(-1, heads, dim))
    return found, pages, port.place.run


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (9, None), (None, 0.5)])
@pytest.mark.parametrize("shape", [(4, 4, 16), (6, 2, 32), (8, 1, 80)])
def test_it_is_the_same_in_c(
    shape: tuple[int, int, int], window: int | None, softcap: float | None, dtype: torch.dtype
) -> None:
    ours, pages, run = outputs(True, shape, dtype, window, softcap)
    theirs, expected, plain = outputs(False, shape, dtype, window, softcap)
    assert run.attention.programs
    assert not plain.attention.programs
    tolerance = TOLERANCE[dtype]
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)
    assert torch.equal(pages.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_heads_that_fill_no_register_stay_with_torch() -> None:
    _, _, run = outputs(True, (2, 2, 24), torch.float32, None)
    assert not run.attention.programs

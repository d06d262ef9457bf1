"""Calls in a tree's code that would wait for a GPU are found."""

from collections.abc import Callable

import pytest
import torch

from tokenmesh.engine.models.tree.waits import Waits

X = torch.arange(6.0)
ROWS = torch.tensor([1, 0, 2])


@pytest.mark.parametrize(
    ("compute", "seen"),
    [
        (lambda: X.sum().item(), "_local_scalar_dense"),
        (lambda: bool((X > 1).any()), "_local_scalar_dense"),
        (lambda: X.nonzero(), "nonzero"),
        (lambda: X[X > 1], "index"),
        (lambda: X.clone().index_put_((X > 1,), torch.tensor(0.0)), "index_put_"),
        (lambda: X[:3].repeat_interleave(ROWS), "repeat_interleave"),
    ],
    ids=["item", "bool", "nonzero", "mask", "assignment", "repeat"],
)
def test_a_result_that_depends_on_numbers_is_seen(compute: Callable[[], object], seen: str) -> None:
    waits = Waits()
    with waits.watching():
        compute()
    assert waits.seen == seen


def test_what_is_only_launched_is_not_seen() -> None:
    waits = Waits()
    with waits.watching():
        torch.where(X > 1, X, 0).masked_fill(X > 2, 1.0)[ROWS].topk(2)
    X.sum().item()
    assert waits.seen is None

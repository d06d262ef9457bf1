"""DraftTree: vLLM's notation, the order of drafts, and what a step computes for them."""

import pytest
from pydantic import ValidationError

from tokenmesh.shared.config.draft_tree import DraftTree, chains_of, kept_of
from tokenmesh.shared.config.speculative import SpeculativeConfig

TEXT = "[(0, 0), (1,), (0,), (0, 1), (0, 0, 0)]"


def test_drafts_fewer_tokens_ahead_come_first_and_name_what_they_follow() -> None:
    tree = DraftTree.of(TEXT)
    assert tree.paths == ((0,), (1,), (0, 0), (0, 1), (0, 0, 0))
    assert tree.parents == (-1, -1, 0, 0, 2)
    assert chains_of(tree.parents) == [[1], [0, 3], [0, 2, 4]]
    # each chain but one computes the last known token again, and what it shares with others
    assert tree.computed == (1, 3, 4, 7, 8)
    assert [tree.children_of(place) for place in range(-1, 5)] == [2, 2, 0, 1, 0, 0]


def test_as_many_of_the_first_drafts_are_taken_as_fit() -> None:
    tree = DraftTree.of(TEXT)
    assert [tree.within(ahead, 99) for ahead in range(5)] == [0, 2, 4, 5, 5]
    assert [tree.within(9, budget) for budget in range(9)] == [0, 1, 1, 2, 3, 3, 3, 4, 5]
    assert [tree.depth_of(count) for count in range(6)] == [0, 1, 1, 2, 2, 3]


def test_the_drafts_that_a_row_drew_are_found_along_one_path() -> None:
    parents = DraftTree.of(TEXT).parents
    drafts = [7, 8, 5, 6, 7]
    assert kept_of(drafts, parents, [7, 5, 7, 1]) == [0, 2, 4]
    assert kept_of(drafts, parents, [7, 6]) == [0, 3]
    assert kept_of(drafts, parents, [8, 5]) == [1]
    assert kept_of(drafts, parents, [5]) == []


def test_a_tree_without_branches_is_a_chain() -> None:
    made = SpeculativeConfig(model="small", speculative_token_tree="[(0,), (0, 0)]")
    assert (made.tree, made.max_drafts) == (None, 2)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("(0,)", "a list of tuples"),
        ("[(0), (0, 0)]", "a list of tuples"),
        ("[(True,)]", "a list of tuples"),
        ("[" * 3000, "a list of tuples"),
        ("[(0,)" + " " * 5000 + "]", "of 4096 characters"),
        ("[(0, 0)]", r"with \(0,\), which \(0, 0\) follows"),
        ("[(0,), (0,)]", "without the same draft twice"),
        ("[(8,)]", "number 0 to 7 in its place"),
    ],
)
def test_what_is_no_tree_is_refused_by_name(text: str, problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        SpeculativeConfig(model="small", speculative_token_tree=text)


def test_a_tree_is_refused_where_drafts_cannot_branch() -> None:
    tree = "[(0,), (1,)]"
    with pytest.raises(ValidationError, match="without speculative_token_tree, for method ngram"):
        SpeculativeConfig(method="ngram", speculative_token_tree=tree)
    with pytest.raises(ValidationError, match=r"num_speculative_tokens 2, .* not 3"):
        SpeculativeConfig(model="small", num_speculative_tokens=3, speculative_token_tree=tree)
    with pytest.raises(ValidationError, match=r"for probabilistic verification"):
        SpeculativeConfig(
            model="small",
            speculative_token_tree=tree,
            rejection_sample_method="probabilistic",
        )

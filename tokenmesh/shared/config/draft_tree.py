"""DraftTree: drafts of a stream that branch, as vLLM's `speculative_token_tree` names them.

`[(0,), (0, 0), (1,)]` are two drafts for the next token, the likeliest two, and one behind the
first of them.
"""

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

MAX_RANK: Final = 7
"""A draft is at most the eighth likeliest in its place."""
_MAX_CHARS: Final = 4096


@dataclass(frozen=True, slots=True)
class DraftTree:
    """All drafts, those that are fewer tokens ahead first: any number of the first is a tree."""

    paths: tuple[tuple[int, ...], ...]
    """By draft: what its ancestors are among their siblings by likelihood, and what it is."""
    parents: tuple[int, ...]
    """These say which draft each one follows; -1: the last known token."""
    computed: tuple[int, ...]
    """Tokens that a step computes for so many of the first drafts, from one on."""

    @classmethod
    def of(cls, text: str) -> "DraftTree":
        """Read vLLM's notation. Raises ValueError that says what is wrong."""
        paths = sorted(_read(text), key=lambda path: (len(path), path))
        place_of = {path: place for place, path in enumerate(paths)}
        for path in paths:
            if path[:-1] and path[:-1] not in place_of:
                raise ValueError(f"with {path[:-1]}, which {path} follows")
        parents = tuple(place_of.get(path[:-1], -1) for path in paths)
        computed = [num_computed(parents[:count]) for count in range(1, len(paths) + 1)]
        return cls(tuple(paths), parents, tuple(computed))

    @property
    def is_chain(self) -> bool:
        """Return whether there is one draft for each place."""
        return self.paths == tuple((0,) * length for length in range(1, len(self.paths) + 1))

    @property
    def num_chains(self) -> int:
        return len(chains_of(self.parents))

    def depth_of(self, count: int) -> int:
        """Return how many tokens ahead the first `count` drafts are, at most."""
        return len(self.paths[count - 1]) if count else 0

    def within(self, depth: int, budget: int) -> int:
        """Return how many of the first drafts are so many tokens ahead, at most, and take no more
        than `budget` tokens of a step."""
        fit = (
            len(path) <= depth and tokens <= budget
            for path, tokens in zip(self.paths, self.computed, strict=True)
        )
        return next((place for place, fits in enumerate(fit) if not fits), len(self.paths))

    def children_of(self, place: int) -> int:
        """Return how many likeliest tokens behind a draft are needed; place -1: behind the last
        known token."""
        pairs = zip(self.paths, self.parents, strict=True)
        return 1 + max((path[-1] for path, parent in pairs if parent == place), default=-1)


def _read(text: str) -> set[tuple[int, ...]]:
    problem = "a list of tuples as [(0,), (0, 0), (1,)]"
    if len(text) > _MAX_CHARS:
        raise ValueError(f"{problem}, of {_MAX_CHARS} characters at most")
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        found = None
    if not isinstance(found, list) or not found:
        raise ValueError(problem)
    for path in found:
        if not isinstance(path, tuple) or not path or any(type(each) is not int for each in path):
            raise ValueError(problem)
        if not all(0 <= each <= MAX_RANK for each in path):
            raise ValueError(f"without {path}: a draft is number 0 to {MAX_RANK} in its place")
    if len(set(found)) < len(found):
        raise ValueError("without the same draft twice")
    return set(found)


def chains_of(parents: Sequence[int]) -> list[list[int]]:
    """Places of the drafts from the last known token to each draft that none follows."""
    chains = []
    followed = set(parents)
    for place in range(len(parents)):
        if place in followed:
            continue
        chain = []
        while place >= 0:
            chain.append(place)
            place = parents[place]
        chains.append(chain[::-1])
    return chains


def num_computed(parents: Sequence[int]) -> int:
    """Tokens that a step computes for drafts: each chain but the first begins at the last known
    token once more."""
    chains = chains_of(parents)
    return sum(len(chain) for chain in chains) + max(0, len(chains) - 1)


def kept_of(drafts: Sequence[int], parents: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """Places of the drafts that are the first of these tokens, one behind the other."""
    kept, last = list[int](), -1
    for token in tokens:
        found = (
            place
            for place, (draft, parent) in enumerate(zip(drafts, parents, strict=True))
            if parent == last and draft == token
        )
        last = next(found, -1)
        if last < 0:
            return kept
        kept.append(last)
    return kept

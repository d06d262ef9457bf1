"""Draws of a group of ranks: the leader's, which the others take over."""

from collections.abc import Sequence
from queue import SimpleQueue

import torch

from tokenmesh.engine.plan import NewRow
from tokenmesh.engine.ranks.link import LeaderLink
from tokenmesh.engine.sampling.sampler import Drafted, Draw, Draws, RowSampler
from tokenmesh.shared.errors import Unavailable


class SharedSampler:
    """Draws, and sends followers the tokens. Implements `RowSampler`."""

    def __init__(self, sampler: RowSampler, link: LeaderLink) -> None:
        self._sampler, self._link = sampler, link
        self.add, self.remove = sampler.add, sampler.remove

    def draw(
        self, numbers: Sequence[int], logits: torch.Tensor, drafted: Sequence[Drafted] = ()
    ) -> Draws:
        draws = self._sampler.draw(numbers, logits, drafted)
        drawn = draws.draws_by_row
        failed = draws.errors
        self._link.send_draws(
            [
                [] if number in failed else [draw.token_id for draw in drawn[number]]
                for number in numbers
            ]
        )
        return draws


class FollowedDraws:
    """The leader's tokens, step by step. Implements `RowSampler`."""

    def __init__(self, drawn: "SimpleQueue[list[list[int]] | None]") -> None:
        self._drawn = drawn

    def add(self, new: NewRow) -> None:
        """Keep nothing: the leader has the state of its draws."""

    def remove(self, number: int) -> None:
        pass

    def draw(
        self, numbers: Sequence[int], logits: torch.Tensor, drafted: Sequence[Drafted] = ()
    ) -> Draws:
        token_ids = self._drawn.get()
        if token_ids is None:
            raise Unavailable("the leader has ended")
        draws = Draws()
        for number, ids in zip(numbers, token_ids, strict=True):
            if ids:
                draws.draws_by_row[number] = [Draw(token_id) for token_id in ids]
            else:
                draws.errors[number] = "it failed on the leader"
        return draws

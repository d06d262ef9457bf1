"""GrammarState: rows whose next token must follow a grammar."""

from collections.abc import Sequence

import numpy as np
import torch

from tokenmesh.kernels.grammar_mask import grammar_mask
from tokenmesh.services.worker_svc.engine.plan import NewRow
from tokenmesh.services.worker_svc.grammar.follower import Follower
from tokenmesh.services.worker_svc.grammar.matcher import GrammarFailed, Masks, num_words


class GrammarState:
    """The rows that have a grammar."""

    def __init__(self, vocab_size: int, eos_token_ids: frozenset[int], step_s: float) -> None:
        """step_s: CPU time of one step of one grammar at most."""
        self._num_words = num_words(vocab_size)
        self._ending = _mask_of([eos for eos in eos_token_ids if eos < vocab_size], vocab_size)
        self._step_s = step_s
        self._follower_by_number: dict[int, Follower] = {}

    def add(self, new: NewRow) -> None:
        """Take a row, when it has a grammar, and follow what it has generated before."""
        follower = Follower.of(new, self._step_s)
        if follower is not None:
            self._follower_by_number[new.row] = follower

    def remove(self, number: int) -> None:
        """Forget a row."""
        self._follower_by_number.pop(number, None)

    def append(self, number: int, token_id: int) -> None:
        """A row has drawn a token."""
        follower = self._follower_by_number.get(number)
        if follower is not None:
            follower.append(token_id)

    def apply(self, logits: torch.Tensor, numbers: Sequence[int]) -> dict[int, str]:
        """Change logits [N, V] in place; numbers [N] are the rows they belong to.

        Returns rows that cannot go on, and why.
        """
        if not self._follower_by_number:
            return {}
        indices, masks, errors = self.masks(numbers)
        if indices:
            rows = torch.tensor(indices, dtype=torch.int32)
            grammar_mask(logits, rows, torch.from_numpy(masks))
        return errors

    def masks(self, numbers: Sequence[int]) -> tuple[list[int], Masks, dict[int, str]]:
        """Indices of the numbers that are constrained now, their masks, and what failed."""
        errors: dict[int, str] = {}
        followers = [
            (index, follower)
            for index, number in enumerate(numbers)
            if (follower := self._follower_by_number.get(number)) is not None
            and follower.is_constrained
        ]
        masks = np.empty((len(followers), self._num_words), dtype=np.int32)
        for place, (index, follower) in enumerate(followers):
            try:
                if not follower.fill(masks, place):
                    masks[place] = self._ending
            except GrammarFailed as error:
                masks[place] = -1
                errors[numbers[index]] = error.message
        return [index for index, _ in followers], masks, errors


def _mask_of(ids: Sequence[int], vocab_size: int) -> Masks:
    bits = np.zeros(num_words(vocab_size) * 32, dtype=np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)

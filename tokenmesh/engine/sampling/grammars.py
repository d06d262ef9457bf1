"""GrammarState: rows whose next token must follow a grammar."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from tokenmesh.engine.grammar.follower import Follower
from tokenmesh.engine.grammar.matcher import GrammarFailed, Masks, num_words
from tokenmesh.engine.plan import NewRow
from tokenmesh.kernels.grammar_mask import grammar_mask


class StepGrammars:
    """The rows of one batch that have a grammar."""

    def __init__(self, followers: Mapping[int, Follower], vocab_size: int) -> None:
        """followers by place in the batch."""
        self._followers = followers
        self._num_words = num_words(vocab_size)
        self.errors: dict[int, str] = {}
        """By place in the batch: why a row cannot continue; complete after `fill`."""

    def fill(self) -> tuple[list[int], Masks]:
        """Places whose next token is restricted, and their masks."""
        constrained = [(i, each) for i, each in self._followers.items() if each.has_mask]
        masks = np.empty((len(constrained), self._num_words), dtype=np.int32)
        for place, (index, follower) in enumerate(constrained):
            try:
                follower.fill(masks, place)
            except GrammarFailed as error:
                masks[place] = -1
                self.errors[index] = error.message
        return [index for index, _ in constrained], masks

    def append(self, index: int, token_id: int) -> None:
        """The row at a place of the batch has drawn a token."""
        follower = self._followers.get(index)
        if follower is not None:
            follower.append(token_id)


class GrammarState:
    """The rows that have a grammar."""

    def __init__(self, vocab_size: int, eos_ids: frozenset[int], step_s: float) -> None:
        """step_s: CPU time of one step of one grammar at most."""
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._step_s = step_s
        self._follower_by_number: dict[int, Follower] = {}

    def add(self, new: NewRow) -> None:
        """Take a row, when it has a grammar, and follow what it has generated before."""
        if new.grammar is None:
            return
        assert new.sampling.structured is not None
        output = new.token_ids[new.num_prompt :]
        self._follower_by_number[new.row] = Follower.after_output(
            new.grammar, new.sampling.structured, output, self._step_s, self._eos_ids
        )

    def remove(self, number: int) -> None:
        self._follower_by_number.pop(number, None)

    def __len__(self) -> int:
        return len(self._follower_by_number)

    def append(self, number: int, token_id: int) -> None:
        """A row has drawn a token."""
        follower = self._follower_by_number.get(number)
        if follower is not None:
            follower.append(token_id)

    def __contains__(self, number: int) -> bool:
        return number in self._follower_by_number

    def of(self, numbers: Sequence[int]) -> StepGrammars:
        """For a batch of these rows; their numbers may be reused later."""
        known = self._follower_by_number
        followers = {i: known[number] for i, number in enumerate(numbers) if number in known}
        return StepGrammars(followers, self._vocab_size)

    def apply(self, logits: torch.Tensor, numbers: Sequence[int]) -> dict[int, str]:
        """Change logits [N, V] in place; numbers [N] are the rows they belong to.

        Returns the errors of rows that cannot continue.
        """
        if not self._follower_by_number:
            return {}
        step = self.of(numbers)
        indices, masks = step.fill()
        if indices:
            rows = torch.tensor(indices, dtype=torch.int32)
            grammar_mask(logits, rows, torch.from_numpy(masks))
        return {numbers[index]: error for index, error in step.errors.items()}

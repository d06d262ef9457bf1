"""ThinkingState: a row that has spent its reasoning budget draws the marker that ends reasoning."""

from collections.abc import Sequence

import torch

from tokenmesh.engine.api.sampling import ThinkingBudget
from tokenmesh.engine.plan import NewRow


class ThinkingTracker:
    """Where one output stands in reasoning, which follows from its tokens alone."""

    def __init__(self, budget: ThinkingBudget, token_ids: Sequence[int], num_prompt: int) -> None:
        self.budget = budget
        self._ends = [budget.end_ids, *budget.other_ends]
        self._width = max(map(len, [budget.start_ids, *self._ends]))
        self.recent = list(token_ids[max(0, num_prompt - self._width) : num_prompt])
        """The last tokens, as many as the longest marker has."""
        self.count = budget.num_spent
        """Reasoning tokens so far."""
        self.is_inside = budget.is_open
        for token in token_ids[num_prompt:]:
            self.push(token)

    def push(self, token_id: int) -> None:
        """Add a token to the output."""
        self.recent.append(token_id)
        del self.recent[: -self._width]
        if self.is_inside:
            self.is_inside = not any(self._ends_with(end) for end in self._ends)
            self.count += self.is_inside
        else:
            self.is_inside = self._ends_with(self.budget.start_ids)

    def forced(self) -> int | None:
        """The only token that may come next; None when any may.

        The beginning of the marker that the output already ends with is not repeated.
        """
        if not self.is_inside or self.count < self.budget.num_tokens:
            return None
        end = self.budget.end_ids
        known = next(n for n in range(len(end) - 1, -1, -1) if self._ends_with(end[:n]) or n == 0)
        return end[known]

    def _ends_with(self, marker: list[int]) -> bool:
        return bool(marker) and self.recent[-len(marker) :] == marker


class ThinkingState:
    """Budgets of the rows that have one."""

    def __init__(self) -> None:
        self._tracker_by_number: dict[int, ThinkingTracker] = {}

    def add(self, new: NewRow) -> None:
        """Take a row with what it has generated before."""
        if new.sampling.thinking is not None:
            tracker = ThinkingTracker(new.sampling.thinking, new.token_ids, new.num_prompt)
            self._tracker_by_number[new.row] = tracker

    def remove(self, number: int) -> None:
        self._tracker_by_number.pop(number, None)

    def __len__(self) -> int:
        return len(self._tracker_by_number)

    def __contains__(self, number: int) -> bool:
        return number in self._tracker_by_number

    def append(self, number: int, token_id: int) -> None:
        """A row has drawn a token."""
        tracker = self._tracker_by_number.get(number)
        if tracker is not None:
            tracker.push(token_id)

    def apply(self, logits: torch.Tensor, numbers: Sequence[int]) -> None:
        """Change logits [N, V] in place; numbers [N] are the rows they belong to.

        It is applied last, so that no other feature can forbid the marker.
        """
        if not self._tracker_by_number:
            return
        for index, number in enumerate(numbers):
            tracker = self._tracker_by_number.get(number)
            token_id = tracker.forced() if tracker is not None else None
            if token_id is not None:
                logits[index] = float("-inf")
                logits[index, token_id] = 0.0

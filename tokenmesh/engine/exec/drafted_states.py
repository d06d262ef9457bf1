"""DraftedStates: states of rows without the drafts that were wrong.

A step with drafts moves a row's states past all of them, and nothing takes a token out again. So
the states are copied before, and where a draft was wrong the row goes on from the copy: its tokens
that are known by then are computed once more, without logits.
"""

from collections.abc import Sequence

import torch

from tokenmesh.engine.models.kv_store import KvStore
from tokenmesh.engine.plan import ScheduledRow, StepPlan, StepResult


class DraftedStates:
    """The copies of one step."""

    def __init__(self, store: KvStore, plan: StepPlan) -> None:
        """Copies the states of all rows with drafts; before the step computes anything."""
        self._store = store
        self._entries = [entry for entry in plan.scheduled if entry.drafts]
        self._rows = [entry.row for entry in self._entries]
        self._copies: Sequence[torch.Tensor] = store.copies_of_rows(self._rows)

    @torch.inference_mode()
    def take_back(self, result: StepResult) -> list[ScheduledRow]:
        """Undo the step for rows with a wrong draft; what has to be computed again for them."""
        again, places = [], []
        for place, entry in enumerate(self._entries):
            # all but the last of what it drew are drafts that were right
            num_right = len(result.tokens.get(entry.row, ())) - 1
            if num_right < 0 or num_right == len(entry.drafts):
                continue
            places.append(place)
            num_tokens = entry.num_tokens + num_right
            again.append(ScheduledRow(entry.row, entry.start, num_tokens, [], False))
        self._store.restore_rows(self._rows, self._copies, places)
        return again

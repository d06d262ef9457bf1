"""RunnerDrafts: drafts of a second model that the runner has, and how many of them pay."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Final

from tokenmesh.engine.request.request import Request
from tokenmesh.engine.runner import Runner
from tokenmesh.engine.speculate.adaptive import Acceptance, Rates, StepCost, choose, survivals
from tokenmesh.shared.config.draft_tree import DraftTree
from tokenmesh.shared.errors import ConfigError

_STRENGTH: Final = 2
"""All drafts of a model are of one class, see `Rates`."""
_IDLE_TOKENS: Final = 8
"""A row without a draft for so many tokens rests."""
_REST_TOKENS: Final = 32
"""For so many the first time, and twice as many each further time."""
_MOST_REST: Final = 1024
_TRIALS: Final = 2
"""A row that wakes up has a draft in so many steps, whatever was measured before."""
_TRIAL_SHARE: Final = 0.01
"""Such drafts of all rows together may take this share of the time of all steps."""
_KEPT_BRANCHES: Final = 256
"""Rows with drafts that a mean remembers."""
_PRIOR_LIKELIEST: Final = 0.6
_PRIOR_NEXT: Final = 0.3
_MOST_SAVED: Final = 2.0
"""Steps without drafts whose time may be saved for them."""


@dataclass(slots=True)
class _Row:
    """It holds what is known of one stream."""

    rates: Rates
    drafts: list[int]
    """It holds what was proposed last."""
    num_known: int = 0
    """So many tokens the request knew then."""
    last_drafted: int = 0
    """Known tokens when it last had drafts, or began to be asked for some."""
    awake_at: int = 0
    """A row that rests is tried again with so many known tokens; 0: it does not rest."""
    rest: int = _REST_TOKENS
    trials: int = 0


def _branch_prior(path: Sequence[int]) -> float:
    """Return how likely a draft is kept before any was seen."""
    return float(prod(_PRIOR_LIKELIEST * _PRIOR_NEXT**rank for rank in path))


class RunnerDrafts:
    """Implements `Proposer` with `StepResult.drafts`: those of the step that drew last.

    How many are wanted is decided a step before they are verified: the runner proposes them once it
    has drawn. A row that rests decodes like one without drafts.
    """

    def __init__(
        self,
        runner: Runner,
        max_rows: int,
        max_drafts: int,
        cost: StepCost | None = None,
        tree: DraftTree | None = None,
    ) -> None:
        """tree: its drafts branch so. Raises ConfigError where the runner's drafter proposes
        fewer."""
        if max_drafts > runner.max_proposed:
            raise ConfigError(
                f"{max_drafts} drafts are wanted, and the model's drafter proposes "
                f"{runner.max_proposed} at most"
            )
        self.max_rows = max_rows
        self.max_drafts = max_drafts
        self.only_predicted = False
        self.num_bytes = 0
        self.tree = tree
        self._kept = [] if tree is None else [_branch_prior(path) for path in tree.paths]
        """It holds how often each draft of a tree was kept, of all rows together."""
        self._acceptance = Acceptance()
        self._cost = StepCost() if cost is None else cost
        self._by_request: dict[Request, _Row] = {}
        self._num_rows = 1
        """Rows of the last step."""
        self._saved = _MOST_SAVED
        """Time that is left for trials, in steps without drafts."""

    def note(self, request: Request, drafts: list[int]) -> None:
        """A step has landed, and its tokens are known: what may follow them."""
        row = self._row_of(request)
        row.num_known, row.drafts = request.num_known, drafts

    def wants(self, request: Request) -> bool:
        row = self._by_request.get(request)
        if row is None or not row.awake_at:
            return True
        if row.awake_at > request.num_known:
            return False
        if self._saved < self._trial_cost:
            row.awake_at = request.num_known + _IDLE_TOKENS
            return False
        row.awake_at, row.trials = 0, _TRIALS
        # it rests again after its trials, unless drafts pay
        row.last_drafted = request.num_known + _TRIALS - _IDLE_TOKENS
        return True

    @property
    def _trial_cost(self) -> float:
        """Return how much longer a step takes with one draft, in steps without."""
        return max(0.0, self._cost.factor(self._num_rows, 1) - 1.0)

    def propose(self, rows: Sequence[tuple[Request, int]], num_rows: int) -> list[list[int]]:
        return [self._take(request)[:limit] for request, limit in rows]

    def ask(self, rows: Sequence[tuple[Request, int]], num_rows: int) -> list[int]:
        """Return how many drafts the runner is to propose for each request after this step, at most
        as many as stand with it. `num_rows` is how many the step has."""
        self._num_rows = num_rows
        found = [self._row_of(request) for request, _ in rows]
        kept = [
            self._survivals(row, min(limit, self.max_drafts))
            for row, (_, limit) in zip(found, rows, strict=True)
        ]
        lengths = choose(self._cost, num_rows, kept)
        is_known = self._cost.is_known(num_rows)
        for index, (row, (request, limit)) in enumerate(zip(found, rows, strict=True)):
            if row.trials and is_known and limit > 0:
                row.trials -= 1
                if not lengths[index] and self._saved >= self._trial_cost:
                    self._saved -= self._trial_cost
                    lengths[index] = 1
            if lengths[index]:
                row.last_drafted = request.num_known
            elif is_known and request.num_known - row.last_drafted >= _IDLE_TOKENS:
                row.awake_at = request.num_known + row.rest
                row.rest = min(2 * row.rest, _MOST_REST)
        return lengths

    def _survivals(self, row: _Row, count: int) -> Sequence[float]:
        if self.tree is None:
            return survivals(row.rates, _STRENGTH, count)
        # the first drafts are asked for, so none may promise more than one before it
        return list(accumulate(self._kept[:count], min))

    def note_branches(self, request: Request, num_drafts: int, kept: Sequence[int]) -> None:
        """These of the drafts of a row that landed were right, by their places in the tree."""
        row = self._row_of(request)
        for place in range(num_drafts):
            self._kept[place] += ((place in kept) - self._kept[place]) / _KEPT_BRANCHES
        if kept:
            row.rest = _REST_TOKENS

    def note_landed(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """So many of the drafts of a row that landed were right."""
        row = self._row_of(request)
        ended_wrong = num_accepted < num_drafts
        self._acceptance.note(row.rates, _STRENGTH, num_accepted, ended_wrong=ended_wrong)
        if num_accepted:
            row.rest = _REST_TOKENS

    def note_step(self, num_rows: int, num_drafts: int, duration_s: float) -> None:
        self._cost.note(num_rows, num_drafts, duration_s)
        self._saved = min(self._saved + _TRIAL_SHARE, _MOST_SAVED)

    def forget(self, request: Request) -> None:
        self._by_request.pop(request, None)

    def _row_of(self, request: Request) -> _Row:
        row = self._by_request.get(request)
        if row is None:
            rates, known = self._acceptance.of_row(), request.num_known
            # where drafts of other streams do not pay, it rests at once
            last = known - _IDLE_TOKENS
            row = self._by_request[request] = _Row(rates, [], last_drafted=last)
        return row

    def _take(self, request: Request) -> list[int]:
        row = self._by_request.get(request)
        if row is None:
            return []
        drafts, row.drafts = row.drafts, []
        # others were drawn since where the request was preempted
        return drafts if row.num_known == request.num_known else []

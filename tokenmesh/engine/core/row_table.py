"""Row table: which request holds which row, and which request a token of an older step is for."""

from collections.abc import Collection, Mapping

from tokenmesh.engine.plan import StepPlan
from tokenmesh.engine.request.request import NO_ROW, Request

Drawn = tuple[list[Request | None], set[int], list[int] | None]
"""It describes of the tokens of a step: their requests, in the order of the rows; rows that may be
at their end or drew several; all tokens, or None where a row drew several."""


class RowTable:
    """Rows 0 .. num_rows-1. A row may be reassigned while a step of its last
    holder is in flight."""

    def __init__(self, num_rows: int) -> None:
        self.requests: list[Request | None] = [None] * num_rows
        """By row."""
        self._free = list(range(num_rows - 1, -1, -1))
        self._removed: list[int] = []
        self._late: dict[int, Request] = {}
        self._stale: dict[int, int] = {}
        """By row that a request lost: the last step with a token of that request."""
        self._step = -1
        self._num_of: dict[str, int] = {}

    @property
    def has_free(self) -> bool:
        """Return whether there is a row to give."""
        return bool(self._free)

    @property
    def by_tenant(self) -> Mapping[str, int]:
        """Rows held by each tenant, of those with any."""
        return self._num_of

    def give(self, request: Request, step: int) -> None:
        """The request gets a row with this step."""
        request.place.row = self._free.pop()
        request.place.admitted_step = step
        self.requests[request.place.row] = request
        tenant = request.spec.owner.tenant
        self._num_of[tenant] = self._num_of.get(tenant, 0) + 1

    def take(self, request: Request) -> None:
        """The request loses its row; the runner gets that with the next plan."""
        row, request.place.row = request.place.row, NO_ROW
        self.requests[row] = None
        self._removed.append(row)
        self._stale[row] = self._step
        self._free.append(row)
        tenant = request.spec.owner.tenant
        self._num_of[tenant] -= 1
        if not self._num_of[tenant]:
            del self._num_of[tenant]

    def remove_again(self, rows: list[int]) -> None:
        """A step failed: the runner may not have got as far as its removed rows."""
        self._removed += [row for row in rows if row not in self._removed]

    def note_step(self, plan: StepPlan) -> None:
        """A step has been scheduled with the rows as they are; one that computes something says
        which were lost since the one before it."""
        self._step = plan.step
        if plan.num_rows:
            plan.removed_rows, self._removed = self._removed, []

    def take_stale(self, step: int) -> set[int]:
        """Rows whose token in that step is not for their holder; to be called in step order."""
        last_by_row = self._stale
        self._stale = {row: last for row, last in last_by_row.items() if last > step}
        return {row for row, last in last_by_row.items() if last >= step}

    def owner(self, row: int, step: int) -> Request | None:
        """The request that held the row in that step, if it still does."""
        request = self.requests[row]
        return request if request is not None and request.place.admitted_step <= step else None

    def expect_late(self, request: Request) -> None:
        """The request loses its row to make room; its token of an in-flight step still counts."""
        # but prompt logprobs go out with the first token, and they are computed again
        if not request.output.wants_prompt_logprobs:
            self._late[request.place.row] = request

    def owners(self, step: int, rows: Collection[int]) -> tuple[list[Request | None], set[int]]:
        """The requests whose tokens rows drew in a step, and the rows lost since by preemption for
        room; to be called once for each step, in order.

        A token is for no request when its own has ended since the launch, or was preempted for
        another reason. No other is admitted in a step that makes room.
        """
        by_row = self.requests
        stale = self.take_stale(step) if self._stale else set()
        if not stale:
            return [by_row[row] for row in rows], stale
        late = {row: self._late.pop(row) for row in stale.intersection(rows, self._late)}
        return [late.get(row) if row in stale else by_row[row] for row in rows], set(late)

    def expect_no_late(self) -> None:
        """All steps that were in flight when a row was lost have landed, or failed."""
        self._late.clear()

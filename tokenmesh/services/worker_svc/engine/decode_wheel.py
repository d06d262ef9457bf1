"""Decoding: the requests that compute one token in every step.

Between two borders nothing distinguishes one step of such a request from the next, so it is not
looked at: the length that it has computed is told from a clock, and it is written down at which
tick its next border comes. What a step costs here goes with borders, not with requests.
"""

from collections import defaultdict

from tokenmesh.services.worker_svc.engine.clock import STILL, StepClock
from tokenmesh.services.worker_svc.engine.request import Request

_NEVER = -1


class Decoding:
    """Members have a row, and all tokens but the one after the last step's are computed.

    Borders are the lengths at which there is something to do: a block is full, one more is needed,
    the last token is drawn, nothing is left to compute from the KV that there is.
    """

    def __init__(self) -> None:
        self._clock = StepClock()
        self._members: dict[int, Request] = {}
        """By row."""
        self._arriving: defaultdict[int, list[Request]] = defaultdict(list)
        """Who reaches a border at a tick; whoever has left, or is due at another one, is skipped.
        No border is further away than a block, so this stays small."""
        self._outgrown: list[Request] = []
        """Whose next token takes it over its rope boundary; it is drawn, or on its way."""

    def __contains__(self, request: Request) -> bool:
        return self._members.get(request.row) is request

    def rows(self) -> list[int]:
        """Rows of all members."""
        return list(self._members)

    def members(self) -> list[Request]:
        """All of them."""
        return list(self._members.values())

    def enter(self, request: Request) -> None:
        """Compute the request's next token with the next tick."""
        length = request.num_computed
        request.clock = self._clock
        request.num_computed = length
        self._members[request.row] = request
        self.expect_border(request, length)

    def leave(self, request: Request) -> None:
        """Stop; nothing happens when it is no member."""
        if request in self._outgrown:
            self._outgrown.remove(request)
        if request in self:
            length = request.num_computed
            request.clock = STILL
            request.num_computed = length
            request.due = _NEVER
            del self._members[request.row]

    def leave_at_end(self, request: Request) -> None:
        """Stop at the token that cannot be computed from the KV that there is.

        It is the request's last, or the first one past its boundary; it may still be on its way.
        """
        length = request.num_computed
        self.leave(request)
        request.num_computed = length - 1
        if length < request.max_len:
            self._outgrown.append(request)

    def add_outgrown(self, request: Request) -> None:
        """A request outside the batch of decoding ones knows the token past its boundary."""
        self._outgrown.append(request)

    def outgrown(self) -> list[Request]:
        """Those that know the token past their boundary: all they know is to be computed again."""
        return [each for each in self._outgrown if each.num_known == each.decode_end]

    def tick(self) -> list[Request]:
        """Every member computes a token; those that reach a border by that, in no order.

        `num_computed` counts the token already. Each stays, and needs `expect_border`, or leaves.
        """
        self._clock.now += 1
        now = self._clock.now
        at_border = []
        for request in self._arriving.pop(now, ()):
            if request.due == now:
                # who left and came back may be here twice
                request.due = _NEVER
                at_border.append(request)
        return at_border

    def expect_border(self, request: Request, length: int) -> None:
        """Look at a member again when it needs it; `length` is what it has computed."""
        capacity, max_len = request.capacity, request.max_len
        border = capacity if length < capacity else capacity + 1
        end = max_len - 1 if length < max_len - 1 else max_len
        if end < border:
            border = end
        if request.decode_end < border:
            border = request.decode_end
        due = request.due = self._clock.now + border - length
        self._arriving[due].append(request)

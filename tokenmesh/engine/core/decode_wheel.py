"""DecodeWheel: how far requests have computed, and when a decoding one needs attention.

Most decoding requests compute one token in every step and nothing else happens to them until a
block or the stream ends. They are not visited: the wheel counts its turns, and each turn has the
list of requests that reach a border with it. A step costs time per border, not per request.
A request with drafts is held: it takes no part in turns, and `advance` counts its tokens, any
number in a step.
"""

from collections import defaultdict

from tokenmesh.engine.request.request import (
    NO_TURNS,
    Request,
    TurnCount,
)

_NEVER = -1


class _Lane:
    """Members whose tokens the same steps compute."""

    __slots__ = ("arriving", "held", "turning", "turns")

    def __init__(self) -> None:
        self.turns = TurnCount()
        self.turning: dict[int, Request] = {}
        """It has by row the members that compute one token each turn."""
        self.held: dict[int, Request] = {}
        """It has by row the other members."""
        self.arriving: defaultdict[int, list[Request]] = defaultdict(list)
        """Requests that reach a border, by turn; those that left or are due at another turn are
        skipped. No border is further away than a block, so this stays small."""


class DecodeWheel:
    """Writes the `decode` part of requests. Members have a row, and all of their tokens but the
    last are computed.

    Borders are the lengths at which there is something to do: a block is full, one more is needed,
    the last token is drawn, nothing is left to compute from the KV that there is.
    """

    def __init__(self, num_lanes: int = 1) -> None:
        self._lanes = [_Lane() for _ in range(num_lanes)]
        self._lane = self._lanes[0]
        self._outgrown: list[Request] = []
        """Requests whose next token exceeds the rope boundary; it is drawn, or on its way."""

    def select(self, lane: int) -> None:
        """Turn this lane's members from here on, and name no others."""
        self._lane = self._lanes[lane]

    def _of(self, request: Request) -> "_Lane":
        return self._lanes[request.place.lane]

    def __contains__(self, request: Request) -> bool:
        lane, row = self._of(request), request.place.row
        return lane.turning.get(row) is request or lane.held.get(row) is request

    def is_held(self, request: Request) -> bool:
        """Return whether `advance` counts the tokens of this member."""
        return self._of(request).held.get(request.place.row) is request

    def rows(self) -> list[int]:
        """Rows that compute a token each turn."""
        return list(self._lane.turning)

    def turning(self) -> list[Request]:
        """Members that compute a token each turn."""
        return list(self._lane.turning.values())

    def held(self) -> list[Request]:
        """Members that `advance` counts."""
        return list(self._lane.held.values())

    def begin(self, request: Request, num_computed: int) -> None:
        """The request has so many tokens, and computes the others from here on."""
        assert request not in self
        request.decode.base = num_computed
        request.decode.is_prefilling = True

    def advance(self, request: Request, num_tokens: int) -> None:
        """Count tokens of a request that takes no part in turns: of a prompt, or with drafts."""
        assert request.decode.turns is NO_TURNS
        request.decode.base += num_tokens

    def finish(self, request: Request) -> None:
        """The last known token is computed, and no other follows it."""
        request.decode.is_prefilling = False

    def enter(self, request: Request) -> None:
        """The last known token is computed: the next one is computed with the next turn."""
        state, length, lane = request.decode, request.num_computed, self._of(request)
        state.is_prefilling = False
        lane.held.pop(request.place.row, None)
        state.turns = lane.turns
        state.base = length - lane.turns.count
        lane.turning[request.place.row] = request
        self.expect_border(request, length)

    def hold(self, request: Request) -> None:
        """Take a member out of the turns."""
        self.leave(request)
        self._of(request).held[request.place.row] = request

    def leave(self, request: Request) -> None:
        """Stop; nothing happens when it is not a member."""
        if request in self._outgrown:
            self._outgrown.remove(request)
        row, state, lane = request.place.row, request.decode, self._of(request)
        if lane.turning.get(row) is request:
            state.base, state.turns, state.due = request.num_computed, NO_TURNS, _NEVER
            del lane.turning[row]
        elif lane.held.get(row) is request:
            del lane.held[row]

    def leave_at_end(self, request: Request) -> None:
        """Stop at the token that cannot be computed from the KV that there is.

        It is the request's last, or the first one past its boundary; it may still be on its way.
        """
        is_turning = request.decode.turns is not NO_TURNS
        self.leave(request)
        request.decode.base -= is_turning  # the turn has counted a token that is not computed
        if request.decode_end < request.spec.max_len:
            self._outgrown.append(request)

    def outgrown(self) -> list[Request]:
        """Requests that know the token past their boundary: all known tokens are computed again."""
        outgrown = self._outgrown
        return outgrown and [each for each in outgrown if each.num_known == each.decode_end]

    def turn(self) -> list[Request]:
        """Compute a token of every turning member; those that reach a border by that, in no order.

        `num_computed` counts the token already. Each stays, and needs `expect_border`, or leaves.
        """
        lane = self._lane
        lane.turns.count += 1
        now = lane.turns.count
        at_border = []
        for request in lane.arriving.pop(now, ()):
            # a request may turn in another lane by now
            if request.decode.due == now and request.decode.turns is lane.turns:
                # a request that left and came back may be here twice
                request.decode.due = _NEVER
                at_border.append(request)
        return at_border

    def expect_border(self, request: Request, length: int) -> None:
        """File a turning member under its next border; `length` is what it has computed."""
        capacity, spec = request.kv.capacity, request.spec
        border = capacity if length < capacity else capacity + 1
        end = spec.max_len - 1 if length < spec.max_len - 1 else spec.max_len
        if end < border:
            border = end
        if spec.rope_boundary is not None and request.decode_end < border:
            border = request.decode_end
        lane = self._of(request)
        due = request.decode.due = lane.turns.count + border - length
        lane.arriving[due].append(request)

"""Stop strings in a text that comes in pieces, found across their borders.

The text ends where the first stop string is complete, so the result does not depend on how the
text was cut. Of two that are complete at once the longer counts.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class Scan(NamedTuple):
    """The result of the search in one piece of text."""

    text: str
    """May be passed on: no stop string can begin in it any more."""
    stop: str | None = None
    """The stop string that was found; the text after it is dropped."""


class StopStrings:
    """The stop strings of a request as an Aho-Corasick automaton: one step a character.

    A state is the longest end of the text so far that begins some stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.next: list[dict[str, int]] = [{}]
        """By state: the state after a character; a missing one means: try `fallback`."""
        self.fallback = [0]
        self.depth = [0]
        """By state: how many characters it stands for."""
        self.found: list[str | None] = [None]
        """By state: the longest stop string that ends here."""
        for stop in stops:
            self._add(stop)
        self._link()

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            following = self.next[state].get(char)
            if following is None:
                following = self.next[state][char] = len(self.next)
                self.next.append({})
                self.fallback.append(0)
                self.depth.append(self.depth[state] + 1)
                self.found.append(None)
            state = following
        if state:
            self.found[state] = stop

    def _link(self) -> None:
        queue = deque(self.next[0].values())
        while queue:
            state = queue.popleft()
            for char, following in self.next[state].items():
                self.fallback[following] = self.step(self.fallback[state], char)
                self.found[following] = (
                    self.found[following] or self.found[self.fallback[following]]
                )
                queue.append(following)

    def step(self, state: int, char: str) -> int:
        """The state after one more character."""
        while True:
            following = self.next[state].get(char)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self.fallback[state]


class StopMatcher:
    """One stream's progress through the automaton, and the text that may still be cut off."""

    def __init__(self, stops: StopStrings, include_stop: bool = False) -> None:
        self._stops = stops
        self._include_stop = include_stop
        self._state = 0
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> Scan:
        """Take the next piece; not to be called again once a stop string was found.

        Without `may_stop` one that is complete in this piece does not count.
        """
        stops, state = self._stops, self._state
        for index, char in enumerate(text):
            state = stops.step(state, char)
            stop = stops.found[state]
            if stop is not None and may_stop:
                return self._end(self._held + text[: index + 1], stop)
        self._state = state
        whole = self._held + text
        num_free = len(whole) - stops.depth[state]
        self._held = whole[num_free:]
        return Scan(whole[:num_free])

    def finish(self) -> str:
        """Return what was held back for a stop string that did not come."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _end(self, whole: str, stop: str) -> Scan:
        self._held, self._state = "", 0
        return Scan(whole if self._include_stop else whole[: len(whole) - len(stop)], stop)

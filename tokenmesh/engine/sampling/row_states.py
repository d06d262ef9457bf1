"""RowStates: the state of all rows that both samplers keep, feature by feature."""

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from tokenmesh.engine.plan import NewRow


class SamplerFeature(Protocol):
    """One feature's state of all rows."""

    def add(self, new: NewRow) -> None:
        """Take a row that is not there."""

    def remove(self, number: int) -> None:
        """Forget a row; nothing happens for one that is not there."""


State = TypeVar("State", bound=SamplerFeature)


class RowStates(Generic[State]):
    """All features' states. A row that comes back draws what it would have drawn."""

    def __init__(self, states: Sequence[State]) -> None:
        self._states = states
        self._num_logprobs: dict[int, int] = {}
        self._named: dict[int, list[int]] = {}
        """Tokens whose log-probabilities a row wants in place of those of the most likely."""

    def add(self, new: NewRow) -> None:
        """Take a row; the previous row of its number is forgotten."""
        self.remove(new.row)
        for state in self._states:
            state.add(new)
        if new.sampling.logprobs is not None:
            named = new.sampling.logprob_token_ids
            self._num_logprobs[new.row] = 0 if named else new.sampling.logprobs
            if named:
                self._named[new.row] = named

    def remove(self, number: int) -> None:
        """Forget a row; nothing happens for one that is not there."""
        for state in self._states:
            state.remove(number)
        self._num_logprobs.pop(number, None)
        self._named.pop(number, None)

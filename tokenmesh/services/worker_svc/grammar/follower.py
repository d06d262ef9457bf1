"""Follower: one stream on its way through its grammar, reasoning before it and its end included."""

from collections.abc import Sequence
from typing import Self

from tokenmesh.services.worker_svc.engine.plan import NewRow
from tokenmesh.services.worker_svc.grammar.matcher import GrammarFailed, Masks, Matcher
from tokenmesh.shared.clock import thread_cpu_s


class Follower:
    """Takes the stream's output tokens one by one, those of earlier attempts first."""

    def __init__(self, matcher: Matcher, after: Sequence[Sequence[int]], step_s: float) -> None:
        """after: what ends reasoning; empty: there is none. step_s: CPU time of a step at most."""
        self._matcher = matcher
        self._after = [list(each) for each in after]
        self._longest = max(map(len, self._after), default=0)
        self._recent: list[int] = []
        self._step_s = step_s
        self._error: str | None = None
        self.is_constrained = not self._after

    @classmethod
    def of(cls, new: NewRow, step_s: float) -> Self | None:
        """Where the row's output has led to; None for a row without a grammar."""
        if new.grammar is None:
            return None
        assert new.sampling.structured is not None
        follower = cls(new.grammar.start(), new.sampling.structured.after, step_s)
        for token_id in new.token_ids[new.num_prompt :]:
            follower.append(token_id)
        return follower

    def append(self, token_id: int) -> None:
        """The stream went on by a token."""
        if self.is_constrained:
            self._accept(token_id)
            return
        self._recent = [*self._recent, token_id][-self._longest :]
        self.is_constrained = any(
            self._recent[-len(ending) :] == ending for ending in self._after if ending
        )

    def fill(self, masks: Masks, index: int) -> None:
        """What may come next, to masks[index], once it is constrained. Raises GrammarFailed."""
        if self._error is not None:
            raise GrammarFailed(self._error)
        if self._matcher.is_terminated():
            # launched before the stream's end was known: nobody takes what is drawn
            masks[index] = -1
            return
        began_s = thread_cpu_s()
        self._matcher.fill(masks, index)
        self._check_time(began_s)

    def _accept(self, token_id: int) -> None:
        if self._error is not None or self._matcher.is_terminated():
            return
        began_s = thread_cpu_s()
        if not self._matcher.accept(token_id):
            self._error = f"the output so far does not follow the grammar: token {token_id}"
            return
        self._check_time(began_s)

    def _check_time(self, began_s: float) -> None:
        if thread_cpu_s() - began_s > self._step_s:
            self._error = f"a step of the grammar takes longer than {self._step_s:g} s"

"""Follower: one stream's position in its grammar, with reasoning before it and the end after it."""

from collections.abc import Iterable, Sequence
from typing import Self

import numpy as np

from tokenmesh.engine.api.structured import Structured
from tokenmesh.engine.grammar.matcher import Grammar, GrammarFailed, Masks, Matcher
from tokenmesh.shared.clock import thread_cpu_s


class Follower:
    """Takes the stream's output tokens one by one, those of earlier attempts first."""

    def __init__(
        self,
        matcher: Matcher,
        after: Sequence[Sequence[int]],
        step_s: float,
        eos_ids: Iterable[int] = (),
        *,
        may_call: bool = False,
    ) -> None:
        """after: ends of reasoning; empty without reasoning. step_s: CPU time limit of a step.

        may_call: the model may end with calls that it writes before the constraint begins.
        """
        self._matcher = matcher
        self._eos_ids = list(eos_ids)
        self._after = [list(each) for each in after]
        self._longest = max(map(len, self._after), default=0)
        self._recent: list[int] = []
        self._step_s = step_s
        self._error: str | None = None
        self.is_constrained = not self._after
        """It tells whether the grammar applies to the next token."""
        self._needs_answer = bool(self._after) and not may_call and not self._takes_nothing()

    @classmethod
    def after_output(
        cls,
        grammar: Grammar,
        structured: Structured,
        output: Iterable[int],
        step_s: float,
        eos_ids: Iterable[int] = (),
    ) -> Self:
        """The follower of a stream that has written `output` so far."""
        may_call = structured.calls is not None
        follower = cls(grammar.start(), structured.after, step_s, eos_ids, may_call=may_call)
        for token_id in output:
            follower.append(token_id)
        return follower

    @property
    def has_mask(self) -> bool:
        """Return whether `fill` forbids anything now: a stream may not end before an answer that
        the grammar wants, so reasoning must end first."""
        return self.is_constrained or self._needs_answer

    def append(self, token_id: int) -> None:
        """Add a token to the stream."""
        if self.is_constrained:
            self._accept(token_id)
            return
        self._recent = [*self._recent, token_id][-self._longest :]
        self.is_constrained = any(
            self._recent[-len(ending) :] == ending for ending in self._after if ending
        )

    def fill(self, masks: Masks, index: int) -> None:
        """Write the allowed tokens to masks[index], if it `has_mask`. Raises GrammarFailed."""
        if not self.is_constrained:
            masks[index] = -1
            words = masks[index].view(np.uint32)
            for token_id in self._eos_ids:
                words[token_id // 32] ^= np.uint32(1 << token_id % 32)
            return
        if self._error is not None:
            raise GrammarFailed(self._error)
        if self._matcher.is_terminated():
            # launched before the stream's end was known: the drawn token is dropped
            masks[index] = -1
            return
        began_s = thread_cpu_s()
        self._matcher.fill(masks, index)
        self._check_time(began_s)

    def _takes_nothing(self) -> bool:
        """Return whether the grammar allows an empty answer."""
        for token_id in self._eos_ids:
            if self._matcher.accept(token_id):
                self._matcher.rollback(1)
                return True
        return False

    def _accept(self, token_id: int) -> None:
        if self._error is not None or self._matcher.is_terminated():
            return
        began_s = thread_cpu_s()
        try:
            is_allowed = self._matcher.accept(token_id)
        except GrammarFailed as error:
            self._error = error.message
            return
        if not is_allowed:
            self._error = f"the output so far does not follow the grammar: token {token_id}"
            return
        self._check_time(began_s)

    def _check_time(self, began_s: float) -> None:
        if thread_cpu_s() - began_s > self._step_s:
            self._error = f"a step of the grammar takes longer than {self._step_s:g} s"

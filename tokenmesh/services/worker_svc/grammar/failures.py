"""Failures: why grammars could not be compiled, so that asking again costs nothing."""

from collections import OrderedDict
from typing import NamedTuple

from tokenmesh.services.worker_svc.grammar.matcher import CannotCompile
from tokenmesh.shared.clock import monotonic_s


class _Failure(NamedTuple):
    reason: str
    until_s: float | None
    """None: it will never compile."""


class Failures:
    """The latest of them, by key."""

    def __init__(self, size: int, retry_s: float) -> None:
        """retry_s: how long one that took too long is not tried again."""
        self._size = size
        self._retry_s = retry_s
        self._failure_by_key: OrderedDict[bytes, _Failure] = OrderedDict()

    def check(self, key: bytes) -> None:
        """Raises CannotCompile when this one has failed before."""
        failure = self._failure_by_key.get(key)
        if failure is None:
            return
        if failure.until_s is not None and failure.until_s <= monotonic_s():
            del self._failure_by_key[key]
            return
        self._failure_by_key.move_to_end(key)
        raise CannotCompile(failure.reason)

    def note(self, key: bytes, reason: str, is_final: bool) -> None:
        """One has failed; is_final: not of time, and so again next time."""
        until_s = None if is_final else monotonic_s() + self._retry_s
        self._failure_by_key[key] = _Failure(reason, until_s)
        self._failure_by_key.move_to_end(key)
        if len(self._failure_by_key) > self._size:
            self._failure_by_key.popitem(last=False)

"""Triton's interpreter patches its language again at every call of a device function; here, once.

That is most of the time of a kernel made of small functions. Patching is idempotent, so nothing
but time changes. Call `patch_once` where Triton interprets.
"""

import inspect
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


class _Patcher:
    """Stands in for `interpreter._patch_lang`."""

    def __init__(self, patch: Any) -> None:
        self._patch = patch
        self._patched: set[str] = set()

    def __call__(self, function: Any) -> Any:
        languages = {
            value.__name__
            for value in function.__globals__.values()
            if inspect.ismodule(value) and value in (tl, tl.core)
        }
        is_launch = not self._patched
        if languages <= self._patched:
            return None
        self._patched |= languages
        scope = self._patch(function)
        return _Scope(scope, self._patched) if is_launch else scope


class _Scope:
    """What a launch restores when it ends."""

    def __init__(self, scope: Any, patched: set[str]) -> None:
        self._scope = scope
        self._patched = patched

    def restore(self) -> None:
        """Unpatch; the next launch patches again."""
        self._patched.clear()
        self._scope.restore()


def patch_once() -> None:
    """For the rest of this process."""
    if not isinstance(interpreter._patch_lang, _Patcher):
        interpreter._patch_lang = _Patcher(interpreter._patch_lang)

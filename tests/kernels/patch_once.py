"""Makes Triton's interpreter repeat less work; nothing but time changes.

It patches its language again at every launch and at every call of a device function, works out the
type, the name and the shape of every value anew, and computes integers twice to find overflows that
it then reports in debug mode only. Call `patch_once` where Triton interprets.
"""

import dataclasses
import inspect
from functools import cache
from typing import Any

import triton
import triton.language as tl
from triton.runtime import interpreter

_core = tl.core


def patch_once() -> None:
    """For the rest of this process."""
    if isinstance(interpreter._patch_lang, _Patcher):
        return
    interpreter._patch_lang = _Patcher(interpreter._patch_lang)
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    if triton.__version__.startswith("3.9."):  # others keep types and shapes in other ways
        _remember_types()


class _Patcher:
    """Stands in for `interpreter._patch_lang`, and never restores what it has patched.

    Its process interprets only, so that no code needs the original functions.
    """

    def __init__(self, patch: Any) -> None:
        self._patch = patch
        self._patched: frozenset[str] = frozenset()

    def __call__(self, function: Any) -> "_Patcher":
        languages = _languages_of(function)
        if not languages <= self._patched:
            self._patched |= languages
            self._patch(function)
        return self

    def restore(self) -> None:
        """Called at the end of a launch."""


@cache
def _languages_of(function: Any) -> frozenset[str]:
    """The modules of Triton's language that a function's module imports."""
    return frozenset(
        value.__name__
        for value in function.__globals__.values()
        if inspect.ismodule(value) and value in (tl, tl.core)
    )


def _remember_types() -> None:
    """Equal types share their name, shape and numpy type; shapes of integers compare as lists."""
    _core.block_type.__init__ = _remembered_block_type(_core.block_type.__init__)
    _core.tensor.__init__ = _init_tensor
    _core.tuple.__eq__ = _remembered_equality(_core.tuple.__eq__)
    interpreter._get_np_dtype = _remembered_numpy_type(interpreter._get_np_dtype)


def _remembered_block_type(init: Any) -> Any:
    known: dict[Any, dict[str, Any]] = {}

    def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = [each.value if type(each) is _core.constexpr else each for each in shape]
        key = (type(element_ty), element_ty.name, *sizes)
        found = known.get(key)
        if found is None:
            init(self, element_ty, shape)
            known[key] = {name: vars(self)[name] for name in ("shape", "numel", "name")}
            return
        vars(self).update(found, element_ty=element_ty)

    return init_block_type


_CONSTANTS: dict[int, tuple[Any, Any, Any]] = {}
"""The size and shape of tensors by the id of a type's shape, which is kept so that ids stay."""


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    """As `tl.tensor.__init__`, but tensors of a shape share it."""
    self.handle = handle
    self.type = type
    self.dtype = type.scalar
    shape = type.shape if type.is_block() else ()
    known = _CONSTANTS.get(id(shape))
    if known is None:
        sizes = [int(each) for each in shape]
        numel = 1
        for size in sizes:
            numel *= size
        constants = _core.tuple([_core.constexpr(size) for size in sizes])
        known = _CONSTANTS[id(shape)] = (shape, _core.constexpr(numel), constants)
    _, self.numel, self.shape = known


def _remembered_equality(equals: Any) -> Any:
    def equals_list(self: Any, other: Any) -> Any:
        values = other.values if type(other) is _core.tuple else other
        if type(values) is list and all(type(each) is int for each in values):
            return _core.constexpr(self.values == values)
        return equals(self, other)

    return equals_list


def _remembered_numpy_type(find: Any) -> Any:
    known: dict[str, Any] = {}

    def numpy_type(of: Any) -> Any:
        element = of.element_ty if type(of) is _core.block_type else of
        if type(element) is not _core.dtype:
            return find(of)
        found = known.get(element.name)
        if found is None:
            found = known[element.name] = find(of)
        return found

    return numpy_type

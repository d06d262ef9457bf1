"""Libraries are imported without optional ones that nothing here uses."""

import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final

logger = logging.getLogger(__name__)

_COMPILER: Final = "torch._dynamo"
_TRACING: Final = f"{_COMPILER}._trace_wrapped_higher_order_op"
_MODELS: Final = tuple(
    f"transformers.{name}" for name in ("modeling_utils", "masking_utils", "generation.utils")
)


@contextmanager
def without(*modules: str) -> Iterator[None]:
    """Importing one of these modules fails inside, unless it has been imported before."""
    hidden = [name for name in modules if name not in sys.modules]
    # None makes their import fail.
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def import_model_classes() -> None:
    """Import what all of transformers' model classes need, without torch's compiler and its
    distributed tensors, which nothing here uses.

    They are 1,300 modules more, a second of CPU and 90 MB of a process. Where the short way fails,
    as it may with another version of transformers, the long way. Raises ImportError.
    """
    if _MODELS[-1] in sys.modules:
        return
    try:
        _say_undistributed()
        with without_compiler():
            for name in _MODELS:
                importlib.import_module(name)
    except Exception as error:
        logger.warning("transformers is imported with all it names: %r", error)
        for name in [each for each in sys.modules if each.partition(".")[0] == "transformers"]:
            del sys.modules[name]
        importlib.import_module(_MODELS[0])


def _say_undistributed() -> None:
    """Let transformers note that torch has no distributed tensors; it asks once."""
    distributed: Any = importlib.import_module("torch.distributed")
    noted: Any = importlib.import_module("transformers.utils.import_utils")
    own = distributed.is_available
    distributed.is_available = lambda: False
    try:
        noted.is_torch_distributed_available()
    finally:
        distributed.is_available = own


@contextmanager
def without_compiler() -> Iterator[None]:
    """Leave functions that are decorated for torch's compiler inside as they are.

    torch's own code for tensors without memory is decorated so, as are models of transformers.
    """
    if _COMPILER in sys.modules:
        yield
        return
    torch: Any = importlib.import_module("torch")
    compiler: Any = importlib.import_module("torch.compiler")
    absent, tracing = _Decorators(_COMPILER), ModuleType(_TRACING)
    absent.__path__ = []
    tracing.TransformGetItemToIndex = _traced_items  # type: ignore[attr-defined]
    own, names = compiler.disable, {_COMPILER: absent, _TRACING: tracing}
    compiler.disable = _as_it_is
    torch._dynamo = absent  # else torch imports it where it is named
    sys.modules.update(names)
    try:
        yield
    finally:
        compiler.disable = own
        del torch._dynamo
        for name in names:
            del sys.modules[name]


class _Decorators(ModuleType):
    """A module in which all names are decorators that change nothing."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _as_it_is


def _as_it_is(function: Callable[..., Any] | None = None, *_: Any, **_named: Any) -> Any:
    return _as_it_is if function is None else function


def _traced_items() -> object:
    """The compiler's own, imported when it is needed."""
    return importlib.import_module(_TRACING).TransformGetItemToIndex()

"""A child ends with the process that started it, kill -9 included.

Only Linux supports that; elsewhere services poll for their parent (`service.exit_with_parent`).
`python -m tokenmesh.shared.parent_death PARENT MODULE ARGUMENTS` runs a module so: a child that
checked for its parent only after its imports would use the processor until then.
"""

import ctypes
import os
import runpy
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_LIBC: Final = ctypes.CDLL(None) if sys.platform == "linux" else None


def dies_with_parent() -> Callable[[], None]:
    """A `preexec_fn` for a child of this process, to be started by a thread that stays."""
    parent = os.getpid()
    return lambda: die_with(parent)


def die_with(parent: int) -> None:
    """In a child: the kernel kills this process as soon as its parent's thread has ended."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the call above
            os._exit(1)


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Inside, the children of a descendant that ends become those of this process. Linux only."""
    assert _LIBC is not None
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 0)


def main() -> None:
    """Ends as the module does."""
    _, parent, module, *arguments = sys.argv
    die_with(int(parent))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

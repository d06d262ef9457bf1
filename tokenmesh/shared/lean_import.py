"""`without`: libraries are imported without optional ones that nothing here uses."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


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

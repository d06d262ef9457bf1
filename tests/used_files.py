"""A plugin of pytest that notes which files of the repository the tests of a process use.

`make test-engine` compares them with what `scripts/chosen_tests.py` says that they depend on. What
other processes use that they start is not among them.
"""

import os
import sys
from pathlib import Path
from typing import Final

ROOT: Final = f"{Path(__file__).resolve().parent.parent}/"
FOLDER: Final = "TESTS_USED_FILES"
"""The environment variable with the folder in which each process writes its list."""
_opened: set[str] = set()


def _note(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and isinstance(path := arguments[0], str) and path.startswith(ROOT):
        _opened.add(path)


sys.addaudithook(_note)


def pytest_sessionfinish() -> None:
    """Write the names of all, relative to the repository."""
    modules = {str(getattr(module, "__file__", None)) for module in [*sys.modules.values()]}
    used = sorted(path.removeprefix(ROOT) for path in _opened | modules if path.startswith(ROOT))
    (Path(os.environ[FOLDER]) / str(os.getpid())).write_text("\n".join(used))

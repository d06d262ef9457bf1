"""Runs the few tests that failed in the last run once more, alone: `make test-failed`.

The first half is what `tests/conftest.py` takes from here: it notes what has failed.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import pytest

MAX_AGAIN: Final = 5
"""More failures are no accident of a busy machine."""
_KEY: Final = "tokenmesh/failed"
_NOTES: Final = Path(".pytest_cache/v", _KEY)
_failed: dict[str, None] = {}
_broken: list[str] = []
"""Files that could not be collected."""


def pytest_sessionstart(session: pytest.Session) -> None:
    _note(session, None)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _failed[report.nodeid] = None


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _broken.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Note the failed tests of a run that came to its end."""
    ended = exitstatus == pytest.ExitCode.TESTS_FAILED and not _broken
    _note(session, list(_failed) if ended else None)


def _note(session: pytest.Session, failed: list[str] | None) -> None:
    cache = getattr(session.config, "cache", None)  # none with `-p no:cacheprovider`
    if cache is not None and not hasattr(session.config, "workerinput"):
        cache.set(_KEY, failed)


def run_again(failed: Sequence[str] | None) -> int:
    """The exit status."""
    if not failed:
        print("no test is run again: the last run failed in another way, or not at all")
        return 1
    if len(failed) > MAX_AGAIN:
        print(f"no test is run again: {len(failed)} failed, more than {MAX_AGAIN}")
        return 1
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", *failed]
    status = subprocess.run(command, check=False).returncode
    for each in failed if status == 0 else ():
        print(f"passed on the second try: {each}")
    return status


if __name__ == "__main__":
    sys.exit(run_again(msgspec.json.decode(_NOTES.read_bytes()) if _NOTES.exists() else None))

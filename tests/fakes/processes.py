"""Processes that a test has ended, or whose parent."""

from collections.abc import Iterable

import psutil


def still_running(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return those that run five seconds later; one that is only not waited for has ended."""
    _, left = psutil.wait_procs(list(processes), timeout=5)
    return [each for each in left if each.status() != psutil.STATUS_ZOMBIE]

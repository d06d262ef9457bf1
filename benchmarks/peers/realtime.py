"""The load generator at real-time priority.

An engine that spins on every core leaves the client waiting for its turn, and tokens that came one
by one are then read in bursts.
"""

import os


def raise_priority() -> str:
    """Real-time for this thread alone, its children not included; says what came of it."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except PermissionError:
        return "normal (real-time is not permitted)"
    return "real-time (SCHED_FIFO 1)"

"""Starts the other ranks of this host as processes that end with this one."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Final

from tokenmesh.shared.config.environment import RankPlace, rank_environment

_MODULE: Final = "tokenmesh.engine.exec.follower"


def launch_process(place: RankPlace) -> Callable[[], bool]:
    """Start a rank, for which a thread of its own waits; whether it has ended."""
    parent = str(os.getpid())
    # -P: what lies in the user's folder must not be imported instead of a library
    command = [sys.executable, "-P", "-m", "tokenmesh.shared.parent_death", parent, _MODULE]
    environment = rank_environment(place)

    def run() -> None:
        # the kernel ends a child with the thread that started it, so this one stays
        subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL).wait()

    thread = threading.Thread(target=run, name=f"rank-{place.rank}", daemon=True)
    thread.start()
    return lambda: not thread.is_alive()

"""A child of `ChildPool` that does what its jobs say: `pool_child FORKS`.

`pid` answers the number of the process that serves, `spin` never ends, `die` kills itself.
"""

import os
import signal
import sys
from collections.abc import Callable
from typing import Final

from tokenmesh.shared.child_pool import serve

TIME_S: Final = 0.2


def prepare(job: bytes) -> Callable[[], bytes]:
    """The work of a job."""
    pid = str(os.getpid()).encode()

    def work() -> bytes:
        while job == b"spin":
            pass
        if job == b"die":
            os.kill(os.getpid(), signal.SIGKILL)
        return pid

    return work


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer, TIME_S, prepare, forks=sys.argv[1] == "forks")

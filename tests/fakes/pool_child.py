"""A child of `ChildPool` that does what its jobs say: `pool_child MODE [SECONDS]`.

`pid` answers the number of the process that serves, `spin` never ends, `die` kills itself. Mode
`forks`: forks do the work, for SECONDS at most; `late`: it never comes to serve.
"""

import os
import signal
import sys
import time
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
    mode, time_s = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else TIME_S
    while mode == "late":
        time.sleep(1.0)
    serve(sys.stdin.buffer, sys.stdout.buffer, time_s, prepare, forks=mode == "forks")

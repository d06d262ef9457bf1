"""A child of the peers' benchmark without a model: `... echo_child MODE`.

`right` answers a token a millisecond, `short` forgets each stream's last one, `noisy` prints into
its own standard output meanwhile, `dead` ends at the first task, `mute` never gets ready.
"""

import os
import sys
import time

from benchmarks.peers.answering import answer_tasks


def main(mode: str) -> None:
    """Answer."""
    if mode == "mute":
        time.sleep(60)

    def run(prompts: list[list[int]], num_tokens: int) -> list[list[float]]:
        if mode == "dead":
            raise SystemExit("no such model")
        if mode == "noisy":
            os.write(1, b"a library says hello\n")
        began = time.perf_counter()
        count = num_tokens - (mode == "short")
        return [[began + (at + 1) / 1e3 for at in range(count)] for _ in prompts]

    answer_tasks(run)


if __name__ == "__main__":
    main(*sys.argv[1:])

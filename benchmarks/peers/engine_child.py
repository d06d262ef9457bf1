"""A child that runs our engine without a bus: `... engine_child DIR THREADS`.

Its settings are those of the worker in the mesh that it is compared with.
"""

import sys
from pathlib import Path

from benchmarks.engine_loop import EngineLoop
from benchmarks.peers.answering import answer_tasks
from tokenmesh.shared.config.worker import WorkerSettings


def main(directory: str, threads: str) -> None:
    """Load and answer."""
    settings = WorkerSettings(cpu_threads=int(threads), enable_prefix_caching=False)
    loop = EngineLoop(Path(directory), settings)
    answer_tasks(lambda prompts, num: loop.run([(prompt, num) for prompt in prompts]))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The child's side of `child.py`: read a task a line, write the answer a line."""

import os
import sys
import time
from collections.abc import Callable

import msgspec

from benchmarks.peers.child import Ready, Task, Times

Run = Callable[[list[list[int]], int], list[list[float]]]
"""(prompts, output tokens of each) -> when each token of each came (`time.perf_counter`)."""


def answer_tasks(run: Run) -> None:
    """Until the parent closes the pipe. What libraries print goes to stderr meanwhile."""
    with os.fdopen(os.dup(1), "wb", buffering=0) as answers:
        os.dup2(2, 1)
        answers.write(msgspec.json.encode(Ready(True)) + b"\n")
        for line in sys.stdin.buffer:
            task = msgspec.json.decode(line, type=Task)
            began_s = time.perf_counter()
            times = run(task.prompts, task.num_tokens)
            answers.write(msgspec.json.encode(Times(began_s, times)) + b"\n")

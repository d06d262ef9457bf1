"""llama.cpp on a GGUF file, asked over JSON lines; runs where llama-cpp-python is installed.

PYTHON -m benchmarks.peers.llama_child FILE THREADS

A line {"prompts": [[id, ...], ...], "num_tokens": n} runs all of them at once, as `child.Task`, and
is answered as `child.Times`; {"windows": [[id, ...], ...]} asks for the log probabilities of each
window's tokens after its first. It needs nothing but llama-cpp-python and NumPy.
"""

import json
import os
import sys
from typing import Any

import numpy as np

from benchmarks.peers.llama_library import LlamaLibrary


def logprobs(rows: Any, ids: list[int]) -> list[float]:
    """Return those of each token after the first; rows are logits [tokens, vocabulary]."""
    found = []
    for row, token in zip(rows[:-1], ids[1:], strict=True):
        wide = row.astype(np.float64)
        top = wide.max()
        found.append(float(wide[token] - top - np.log(np.exp(wide - top).sum())))
    return found


def main(file: str, threads: str) -> None:
    """Load and answer until the parent closes the pipe."""
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)
        library = LlamaLibrary(file, int(threads))
        answers.write('{"ready": true}\n')
        for line in sys.stdin:
            task = json.loads(line)
            if "windows" in task:
                rows = [logprobs(library.logits(ids), ids) for ids in task["windows"]]
                answers.write(json.dumps({"logprobs": rows}) + "\n")
                continue
            times = library.run(task["prompts"], task["num_tokens"])
            found = {"began_s": library.began_s, "token_times": times}
            answers.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

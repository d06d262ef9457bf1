"""A child that runs transformers: `python -m benchmarks.peers.transformers_child KIND DIR THREADS`.

KIND is `generate` or `continuous`.
"""

import sys
from functools import partial

import torch
from transformers import AutoModelForCausalLM

from benchmarks.peers.answering import answer_tasks
from benchmarks.peers.transformers_runs import continuous, generate


def main(kind: str, directory: str, threads: str) -> None:
    """Load and answer."""
    torch.set_num_threads(int(threads))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
    if kind == "generate":
        answer_tasks(partial(generate, model))
        return
    with continuous(model) as run:
        answer_tasks(lambda prompts, num: run([(prompt, num) for prompt in prompts]))


if __name__ == "__main__":
    main(*sys.argv[1:])

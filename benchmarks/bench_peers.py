"""The same model on the same machine in one run: TokenMesh over HTTP compared with other engines.

    python -m benchmarks.bench_peers --vllm-python ~/vllm/bin/python --out peers.json

Random weights in bfloat16, prompts of random ids, greedy, every stream of the full length. Peers
take turns in every round; each waits frozen while another is measured. Decode steps compared with
plain reads of as many bytes as the weights have, in every round too, say how near one stream is
to what the memory allows.
"""

import argparse
import sys
from collections.abc import Sequence

from benchmarks.peers.results import ModelResult
from benchmarks.peers.roster import PEERS, Setting
from benchmarks.peers.session import add_options, probe_bound, run_models
from benchmarks.peers.turns import open_turns
from benchmarks.random_model import ModelShape

MODELS = ("qwen2.5-0.5b", "llama-42m")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, prog="bench_peers", formatter_class=argparse.RawTextHelpFormatter
    )
    add_options(parser, MODELS)
    add = parser.add_argument
    add("--peers", nargs="+", choices=sorted(PEERS), help="default: all that are installed")
    add("--streams", type=int, nargs="+", default=[1, 8, 32])
    add("--prompt", type=int, default=128, help="prompt tokens")
    add("--tokens", type=int, default=128, help="output tokens of each stream")
    add("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    if options.peers is None:
        absent = ["bus", "warm-bus"]
        absent += ["vllm", "vllm-all-cores"] * (options.vllm_python is None)
        absent += ["llama.cpp"] * (options.llama_bench is None)
        options.peers = [name for name in PEERS if name not in absent]
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and save; 1 when a peer that was asked for is missing."""
    options = parse(arguments)

    async def measure(shape: ModelShape, result: ModelResult, setting: Setting) -> None:
        async with open_turns(shape, result, options.peers, setting, say) as turns:
            for number in range(options.rounds):
                result.bounds.append(await probe_bound(setting))
                await turns.round(options.streams, (options.prompt, options.tokens), number)

    result = run_models(options, measure)
    return 1 if any(model.missing for model in result.models) else 0


def say(line: str) -> None:
    """A run takes minutes: show each number as it comes."""
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())

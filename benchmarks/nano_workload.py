"""nano-vllm's benchmark: 256 requests of random ids, 100 to 1,024 tokens in and out, seed 0.

The draws come in the order of its bench.py, so that all 256 ask for the same 133,966 output tokens
as everyone else's runs of it.
"""

from random import Random
from typing import Final

from benchmarks.engine_loop import Ask

REQUESTS: Final = 256
TEMPERATURE: Final = 0.6
_SHORTEST: Final = 100
_LONGEST: Final = 1024
_LARGEST_ID: Final = 10_000


def nano_asks(requests: int = REQUESTS) -> list[Ask]:
    """The first `requests` of them: prompt and output length."""
    random = Random(0)
    prompts = [
        [random.randint(0, _LARGEST_ID) for _ in range(random.randint(_SHORTEST, _LONGEST))]
        for _ in range(REQUESTS)
    ]
    lengths = [random.randint(_SHORTEST, _LONGEST) for _ in range(REQUESTS)]
    return list(zip(prompts, lengths, strict=True))[:requests]

"""transformers, run in this process: a static batch, and its continuous batching."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch

from benchmarks.engine_loop import Ask, Clock

Run = Callable[[Sequence[Ask]], list[list[float]]]
"""When each token of each ask came."""
_PAGE_SIZE: Final = 256
_BLOCKS: Final = 512
"""KV blocks of continuous batching."""
_MAX_BATCH_TOKENS: Final = 2048


class _Moments:
    """A streamer that notes when a token of the batch came; the first call brings the prompt."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self._seen.append(self._clock())

    def end(self) -> None:
        pass

    @property
    def token_times(self) -> list[float]:
        return self._seen[1:]


def generate(
    model: Any, prompts: list[list[int]], num_tokens: int, clock: Clock = time.perf_counter
) -> list[list[float]]:
    """One static batch of equally long prompts: when each token of each came."""
    ids = torch.tensor(prompts, device=model.device)
    moments = _Moments(clock)
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
            streamer=moments,
        )
    return [moments.token_times] * len(prompts)


@contextmanager
def continuous(model: Any, temperature: float = 0.0) -> Iterator[Run]:
    """transformers' continuous batching while the context lasts. `Run` raises RuntimeError."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    chosen = {"do_sample": True, "temperature": temperature} if temperature else {}
    with model.continuous_batching_context_manager(
        generation_config=GenerationConfig(eos_token_id=-1, pad_token_id=0, **chosen),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=_PAGE_SIZE,
            num_blocks=_BLOCKS,
            max_batch_tokens=_MAX_BATCH_TOKENS,
            allow_block_sharing=False,
        ),
    ) as manager:
        yield lambda asks: _run(manager, asks)


def _run(manager: Any, asks: Sequence[Ask]) -> list[list[float]]:
    names = [
        manager.add_request(prompt, max_new_tokens=num_tokens, record_timestamps=True)
        for prompt, num_tokens in asks
    ]
    found: dict[str, list[float]] = {}
    while len(found) < len(names):
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            if result.error is not None:
                raise RuntimeError(f"a request failed: {result.error}")
            found[result.request_id] = result.timestamps
        elif result is None and not manager.is_running():
            raise RuntimeError("continuous batching ended")
    return [found[name] for name in names]

"""The engine in this process, without a bus: the same scheduler and runner, driven step by step.

Every run has a fresh engine, made before it: the blocks alone take some milliseconds. Or all have
the same, for what one run leaves to the next.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from tokenmesh.engine.adapters.adapter import ReadAdapter
from tokenmesh.engine.core.engine import Engine
from tokenmesh.engine.exec.build import build_runner
from tokenmesh.engine.exec.build_any import build
from tokenmesh.engine.exec.loaded_model import RunnableModel
from tokenmesh.engine.exec.role import Role
from tokenmesh.engine.request.request import Request
from tokenmesh.engine.request.spec import RequestSpec, StreamKey
from tokenmesh.shared.config.model import Dtype, ModelImpl, ModelSettings, QuantizationName
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.hashing import Adapter
from tokenmesh.shared.ids import GatewayId, RequestId
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.messages.tokens import Delta
from tokenmesh.shared.tokens import BYTES_PER_ID

Ask = tuple[list[int], int]
"""Prompt and output tokens."""
Clock = Callable[[], float]
_GATEWAY: Final = GatewayId("bench")


class EngineLoop:
    """A loaded model; every `run` is an engine on it, one at a time."""

    def __init__(
        self,
        directory: Path,
        settings: WorkerSettings,
        dtype: Dtype = "bfloat16",
        model_impl: ModelImpl = "auto",
        *,
        keeps_cache: bool = False,
        quantization: QuantizationName | None = None,
        role: Role | None = None,
    ) -> None:
        """keeps_cache: all runs are on one engine. role: of a rank that is measured alone."""
        self._settings = settings
        self._keeps_cache = keeps_cache
        model = ModelSettings(
            model=str(directory), dtype=dtype, model_impl=model_impl, quantization=quantization
        )
        if role is None:
            built = build(model, settings, lambda done, total: None)
        else:
            built = build_runner(model, settings, lambda done, total: None, role)
        assert isinstance(built, RunnableModel), "it generates"
        self.model = built
        self._next = Engine(self.model.runner, settings)

    def take_turns(self) -> None:
        """Let stages of a pipeline compute one step after the other."""
        self.model.runner.num_lanes = 1
        self._next = Engine(self.model.runner, self._settings)

    def run(
        self,
        asks: Sequence[Ask],
        clock: Clock = time.perf_counter,
        temperature: float = 0.0,
        adapters: Sequence[ReadAdapter | None] = (),
    ) -> list[list[float]]:
        """All at once, to the full length: when each token of each came.

        adapters: of each stream; none of any where it is empty. Raises RuntimeError when a request
        fails.
        """
        times: list[list[float]] = [[] for _ in asks]
        for deltas in self.steps(asks, temperature, adapters):
            now = clock()
            for delta in deltas:
                times[delta.stream].extend([now] * (len(delta.token_ids) // BYTES_PER_ID))
        return times

    def steps(
        self,
        asks: Sequence[Ask],
        temperature: float = 0.0,
        adapters: Sequence[ReadAdapter | None] = (),
    ) -> Iterator[list[Delta]]:
        """All at once; what each step brought, when it has ended.

        Raises RuntimeError when a request fails.
        """
        engine = self._next
        try:
            for stream, ask in enumerate(asks):
                adapter = adapters[stream] if adapters else None
                engine.add(_request(stream, ask, temperature, adapter))
            while engine.has_work:
                engine.step()
                deltas = engine.take_output().deltas.get(_GATEWAY, [])
                for delta in deltas:
                    if delta.error is not None:
                        raise RuntimeError(f"a request failed: {delta.error.message}")
                yield deltas
        finally:
            if not self._keeps_cache:
                self._next = Engine(self.model.runner, self._settings)


def _request(
    stream: int, ask: Ask, temperature: float, adapter: ReadAdapter | None = None
) -> Request:
    prompt, num_tokens = ask
    sampling = SamplingParams(
        seed=stream, max_tokens=num_tokens, temperature=temperature, ignore_eos=True
    )
    key = StreamKey(_GATEWAY, stream, 0)
    spec = RequestSpec(
        key,
        RequestId(f"r{stream}"),
        len(prompt),
        sampling,
        lora=None if adapter is None else Adapter("adapter", adapter.content_hash),
    )
    request = Request(spec, list(prompt))
    request.prepared.adapter = None if adapter is None else adapter.matrices
    return request

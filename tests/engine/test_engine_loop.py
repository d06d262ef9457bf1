"""The engine and transformers as the benchmarks drive them in one process."""

import itertools

import pytest
import torch

from benchmarks.bench_quantized import weight_bytes
from benchmarks.engine_loop import EngineLoop
from benchmarks.peers.transformers_runs import continuous, generate
from tests.fakes.tiny import Tiny, prompt_of
from tokenmesh.shared.config.worker import WorkerSettings

SETTINGS = WorkerSettings(num_gpu_blocks_override=64, enable_prefix_caching=False)


def test_every_ask_gets_all_its_tokens_in_time(tiny: Tiny) -> None:
    loop = EngineLoop(tiny("llama").directory, SETTINGS)
    asks = [(prompt_of(9), 5), (prompt_of(40, seed=1), 1), (prompt_of(3, seed=2), 12)]
    ticks = itertools.count()
    for temperature in (0.0, 0.6):
        times = loop.run(asks, clock=lambda: float(next(ticks)), temperature=temperature)
        assert [len(each) for each in times] == [5, 1, 12]
        assert all(each == sorted(set(each)) for each in times)


@pytest.mark.parametrize("native", [True, False])
def test_the_bytes_of_weights_are_counted_in_every_layout(tiny: Tiny, native: bool) -> None:
    directory = tiny("llama").directory
    settings = SETTINGS.model_copy(update={"native_kernels": native})
    stored = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    loop = EngineLoop(directory, settings, dtype="float32")
    assert 0.8 * stored < weight_bytes(loop) < 3 * stored


def test_a_failed_request_is_an_error(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = EngineLoop(tiny("llama").directory, SETTINGS)

    def broken(*_: object, **__: object) -> torch.Tensor:
        raise ValueError("no such tensor")

    monkeypatch.setattr("tokenmesh.engine.exec.runner.TorchRunner.forward", broken)
    with pytest.raises(RuntimeError, match="no such tensor"):
        loop.run([(prompt_of(9), 5)])


def test_transformers_tells_when_each_token_came(tiny: Tiny) -> None:
    model = tiny("llama").make_oracle()
    ticks = itertools.count()
    times = generate(model, [prompt_of(9), prompt_of(9, seed=1)], 5, lambda: float(next(ticks)))
    assert times == [[1.0, 2.0, 3.0, 4.0, 5.0]] * 2


def test_continuous_batching_answers_in_the_order_of_the_requests(tiny: Tiny) -> None:
    with continuous(tiny("llama").make_oracle()) as run:
        times = run([(prompt_of(9), 7), (prompt_of(20, seed=1), 2)])
        assert [len(each) for each in times] == [7, 2]
        assert all(each == sorted(each) for each in times)
        assert [len(each) for each in run([(prompt_of(5), 3)])] == [3]

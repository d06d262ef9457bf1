"""Experts move between ranks while streams run, and no stream notices."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.fakes.engine_driver import EngineDriver, Job
from tests.fakes.rank_runs import jobs, same, sampled
from tests.fakes.ranks import RanksDriver
from tests.fakes.tiny import Tiny, prompt_of
from tests.rounds import some
from tokenmesh.engine.exec import balancer
from tokenmesh.engine.models.tree.expert_slots import ExpertSlots
from tokenmesh.engine.ranks.placement import imbalance
from tokenmesh.shared.config.eplb import EplbConfig
from tokenmesh.shared.errors import ConfigError

EXPERTS: dict[str, Any] = {"enable_expert_parallel": True, "enable_eplb": True}
OFTEN: dict[str, Any] = {"window_size": 6, "step_interval": 12}
CASES: dict[str, tuple[str, int, int]] = {
    "copies": ("qwen3_moe", 2, 2),
    "no-copies": ("mixtral", 2, 0),
    "biases-by-expert": ("gpt_oss", 2, 4),
    "groups": ("deepseek_v3", 2, 2),
    "four-ranks": ("qwen3_moe", 4, 4),
}


def slots_of(driver: RanksDriver) -> list[ExpertSlots]:
    runner: Any = driver.model.runner
    return list(runner.model.expert_slots)


@some(CASES, {"copies", "four-ranks"})
def test_streams_go_on_while_experts_move(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(balancer, "MOST_BYTES", 3000)  # an expert takes several steps
    family, world, spare = CASES[name]
    config = {**OFTEN, "num_redundant_experts": spare}
    many = RanksDriver(tiny(family).directory, world, eplb_config=config, **EXPERTS)
    one = EngineDriver(tiny(family).directory, cpu_threads=1)
    before = [list(each.experts) for each in slots_of(many)]
    long = [Job(prompt_of(9, seed), sampled(seed, logprobs=2)) for seed in range(4)]
    long = [Job(each.prompt, sampled(number, max_tokens=60)) for number, each in enumerate(long)]
    same(many.run(long), one.run(long))
    same(many.run(jobs(), steps_between=2), one.run(jobs(), steps_between=2))
    after = [list(each.experts) for each in slots_of(many)]
    assert after != before, "no expert has moved"
    assert all(
        set(each) == set(range(slots.num_experts))
        for each, slots in zip(after, slots_of(many), strict=True)
    )
    many.close()


def test_experts_are_where_they_began_after_a_deep_sleep(tiny: Tiny) -> None:
    config = {**OFTEN, "num_redundant_experts": 2}
    two = RanksDriver(tiny("qwen3_moe").directory, eplb_config=config, **EXPERTS)
    expected = two.run(jobs())
    two.run([Job(prompt_of(9, seed), sampled(seed, max_tokens=40)) for seed in range(3)])
    assert two.sleep(2) > 0
    two.model.resident.wake(["weights", "kv_cache"])
    same(two.again().run(jobs()), expected)
    two.close()


def test_a_skew_of_the_router_is_balanced_with_the_loads_that_are_counted() -> None:
    """Zipf 1.2 over 64 experts on four ranks."""
    loads = 1 / np.arange(1, 65) ** 1.2
    np.random.default_rng(1).shuffle(loads)
    drawn = torch.multinomial(torch.tensor(loads), 20_000, replacement=True)

    experts = [each for first in range(0, 64, 16) for each in (*range(first, first + 16), first)]
    layer = SimpleNamespace(num_bytes=10, num_experts=64, experts=experts, counts=torch.zeros(64))
    layers: Any = [layer]
    config = EplbConfig(step_interval=4, window_size=9)
    own = balancer.Balancer(config, 4, 1, 1, lambda: layers)
    assert own.next_part() is None
    layer.counts = torch.bincount(drawn, minlength=64)
    parts = [own.next_part() for _ in range(200)]
    now = list(experts)
    for part in (each for each in parts if each is not None):
        if part.swaps:
            now[part.source], now[part.target] = now[part.target], now[part.source]
        else:
            now[part.target] = now[part.source]
    assert imbalance(loads, experts, 4) > 1.4
    assert imbalance(loads, now, 4) <= 1.15


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"enable_eplb": True}, "which ranks have with enable_expert_parallel"),
        ({**EXPERTS, "eplb_config": {"num_redundant_experts": 3}}, "3 redundant .* by 2 ranks"),
    ],
)
def test_what_does_not_move_is_named(tiny: Tiny, settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        RanksDriver(tiny("qwen3_moe").directory, **settings)
    assert caught.value.param == "worker.enable_eplb"


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_model_without_experts_is_refused(tiny: Tiny, name: str) -> None:
    with pytest.raises(ConfigError, match="has no experts"):
        RanksDriver(tiny(name).directory, **EXPERTS)

"""Module trees with parts replaced by our own: the same tokens as transformers, and which parts."""

from pathlib import Path
from typing import NoReturn

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from tests.fakes.engine_driver import EngineDriver, Job, greedy
from tests.fakes.family_configs import OTHERS, checkpoint_of, other_config
from tests.fakes.tiny import Tiny, TinyCheckpoint, prompt_of
from tests.ops.native import needs_native
from tokenmesh.engine.models.promotion.read_heads import Unread
from tokenmesh.engine.models.tree import build
from tokenmesh.engine.models.tree import swap as swap_module
from tokenmesh.engine.models.tree.model import HfModel
from tokenmesh.engine.models.tree.recognise import norm_of, record
from tokenmesh.engine.models.tree.swap import PackedWeight, swap

NUM_TOKENS = 16


@pytest.fixture(autouse=True)
def _swap_small_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap_module, "MIN_ELEMENTS", 0)
    monkeypatch.setattr(build, "promote", stay_a_tree)


def stay_a_tree(_model: HfModel, _native: bool) -> NoReturn:
    raise Unread("it is to be swapped")


def assert_same_tokens(checkpoint: TinyCheckpoint, native: bool) -> None:
    prompts = [prompt_of(37, seed=1), prompt_of(20, seed=2)]
    driver = EngineDriver(
        checkpoint.directory,
        model_impl="transformers",
        max_num_batched_tokens=7,
        native_kernels=native,
    )
    jobs = [Job(prompt, greedy(NUM_TOKENS)) for prompt in prompts]
    tokens = driver.tokens(jobs)
    assert tokens == checkpoint.greedy(prompts, NUM_TOKENS, tokens)


NATIVE_KIND = (
    "llama",
    "llama_odd",
    "qwen2",
    "qwen3",
    "phi3",
    "glm4",
    "olmo2",
    "granite",
    "exaone4",
)
IN_C = frozenset({"llama_odd", "phi3", "granite", "exaone4"})
IN_TORCH = frozenset({"llama_odd", "glm4"})
"""Sizes without C kernels, joined projections; the others run no further lines."""


@pytest.mark.parametrize(
    ("name", "native"),
    [
        *(
            pytest.param(name, True, marks=() if name in IN_C else pytest.mark.slow)
            for name in NATIVE_KIND
        ),
        *(
            pytest.param(name, False, marks=() if name in IN_TORCH else pytest.mark.slow)
            for name in NATIVE_KIND
        ),
    ],
)
def test_families_of_the_native_kind(tiny: Tiny, name: str, native: bool) -> None:
    assert_same_tokens(tiny(name), native)


@pytest.mark.parametrize("architecture", OTHERS)
def test_other_families(tmp_path: Path, architecture: str) -> None:
    checkpoint = checkpoint_of(tmp_path / "model", other_config(architecture))
    assert_same_tokens(checkpoint, native=True)


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("name", ["qwen3_next", "deepseek_v3"])
def test_experts_of_a_tree_run_by_our_op(tiny: Tiny, name: str, native: bool) -> None:
    driver = EngineDriver(tiny(name).directory, model_impl="transformers", native_kernels=native)
    model = driver.model.resident._model
    assert isinstance(model, HfModel)
    layers = [each for each in model.tree.body.modules() if hasattr(each, "is_transposed")]
    assert layers
    assert all(hasattr(each, "port") and not list(each.parameters()) for each in layers)


class _Tied(torch.nn.Module):
    """A head that shares its weight with an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(20, 8)
        self.head = torch.nn.Linear(8, 20, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.table(ids))
        return logits


@torch.inference_mode()
def test_a_head_that_shares_its_weight_with_an_embedding_is_a_product() -> None:
    tied, ids = _Tied(), torch.tensor([[3, 1, 19]])
    expected = tied(ids)
    modules = list(tied.modules())
    swap(modules, record(modules, lambda: tied(ids)), native=False)
    assert tied.head.weight.is_meta
    assert not tied.table.weight.is_meta
    torch.testing.assert_close(tied(ids), expected)


class _Router(torch.nn.Module):
    """Its own weights: one for a product, one that is read in another way as well."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(6, 8))
        self.read = torch.nn.Parameter(torch.randn(6, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = torch.nn.functional.linear(x, self.weight)
        return logits + torch.nn.functional.linear(x, self.read) + self.read.sum()


@needs_native
@torch.inference_mode()
def test_a_product_with_a_weight_of_its_own_runs_in_c() -> None:
    router, x = _Router(), torch.randn(2, 5, 8)
    expected = router(x)
    swap([router], record([router], lambda: router(x)), native=True)
    assert isinstance(router.weight, PackedWeight)
    assert isinstance(router.read, torch.nn.Parameter)
    assert type(router(x)) is torch.Tensor
    torch.testing.assert_close(router(x), expected)
    # whatever else is done with the weight sees the plain one
    wide = torch.nn.functional.linear(x.double(), router.weight.double())
    assert type(wide) is torch.Tensor
    torch.testing.assert_close(wide.float(), torch.nn.functional.linear(x, router.weight))


class _Block(torch.nn.Module):
    """Projections as attention modules have them."""

    def __init__(self) -> None:
        super().__init__()
        self.q = torch.nn.Linear(8, 12)
        self.k = torch.nn.Linear(8, 4, bias=False)
        self.gate = torch.nn.Linear(8, 8)
        self.down = torch.nn.Linear(4, 8)
        self.read = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.q(x).view(-1, 4)[: x.shape[1]] + self.k(x)[0]
        out: torch.Tensor = self.down(mixed)[None] @ self.read.weight
        out = out + self.gate(2 * x) + self.read(x)
        return out


@torch.inference_mode()
def test_projections_of_one_input_become_one_product() -> None:
    block, x = _Block(), torch.randn(1, 5, 8)
    expected = block(x)
    modules = list(block.modules())
    swap(modules, record(modules, lambda: block(x)), native=False)
    torch.testing.assert_close(block(x), expected)
    is_swapped = {name: part.weight.is_meta for name, part in block.named_children()}
    assert is_swapped == {"q": True, "k": True, "gate": True, "down": True, "read": False}
    # read once more, and for another tensor, before the other part was taken
    torch.testing.assert_close(block.q(x), block.q(x))
    torch.testing.assert_close(block.k(2 * x), 2 * block.k(x))


@torch.inference_mode()
def test_a_gated_mlp_with_another_activation_is_one_too() -> None:
    class Config:
        hidden_size, intermediate_size, hidden_act, mlp_bias = 8, 12, "relu2", True

    mlp, x = LlamaMLP(Config()), torch.randn(1, 5, 8)
    expected = mlp(x)
    modules = list(mlp.modules())
    swap(modules, record(modules, lambda: mlp(x)), native=False)
    assert "forward" in vars(mlp)
    torch.testing.assert_close(mlp(x), expected)


class _LimitedMlp(LlamaMLP):  # type: ignore[misc]
    """Limits gate and up, as some families do, to what small numbers do not reach."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(x).clamp(max=20), self.up_proj(x).clamp(-20, 20)
        out: torch.Tensor = self.down_proj(self.act_fn(gate) * up)
        return out


@torch.inference_mode()
def test_a_gated_mlp_with_a_limit_stays_as_it_is() -> None:
    class Config:
        hidden_size, intermediate_size, hidden_act, mlp_bias = 8, 12, "silu", False

    mlp, x = _LimitedMlp(Config()), 1e3 * torch.randn(1, 5, 8)
    expected = mlp(x)
    modules = list(mlp.modules())
    swap(modules, record(modules, lambda: mlp(x)), native=False)
    assert "forward" not in vars(mlp)
    torch.testing.assert_close(mlp(x), expected)


@torch.inference_mode()
def test_norms_are_found_by_what_they_compute() -> None:
    plain, offset = LlamaRMSNorm(8, 1e-5), Gemma3RMSNorm(8, 1e-4)
    for module in (plain, offset):
        module.weight.copy_(torch.randn(8))
    found = norm_of(plain)
    assert found is not None
    assert found.eps == 1e-5
    torch.testing.assert_close(found.weight, plain.weight.data)
    found = norm_of(offset)
    assert found is not None
    assert found.eps == 1e-4
    torch.testing.assert_close(found.weight, offset.weight.data + 1)
    assert norm_of(torch.nn.LayerNorm(8, bias=False)) is None
    assert norm_of(torch.nn.Linear(8, 1, bias=False)) is None

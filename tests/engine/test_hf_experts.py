"""Experts of transformers' modules through our op, against the modules' own way."""

import importlib
import pkgutil
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
import transformers
from torch import nn
from transformers.activations import ACT2FN

from tests.ops.native import needs_native
from tokenmesh.engine.models.tree.experts import NAME, prepare, spec_of
from tokenmesh.kernels.moe import ExpertsSpec, activated, experts_reference

NUM_EXPERTS, HIDDEN, INNER, LIMIT = 6, 24, 36, 0.7
TYPICAL: Final = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "nemotron_h", "aria", "gemma4")
ODD: Final = ("deepseek_v4", "glm5_next", "minimax_m3_vl", "step3p7", "openai_privacy_filter")
REFUSED: Final = {"muse_spark": "norm after each", "inkling2": "its activation is not supported"}
WAYS = [pytest.param(False, id="torch"), pytest.param(True, id="native", marks=needs_native)]


def families() -> list[Any]:
    """Every package of transformers with experts of this interface."""
    root = Path(transformers.__file__).parent / "models"
    found = []
    for package in pkgutil.iter_modules([str(root)]):
        path = root / package.name / f"modeling_{package.name}.py"
        if path.exists() and re.search(r"^@use_experts_impl", path.read_text("utf-8"), re.M):
            is_quick = package.name in (*TYPICAL, *ODD, *REFUSED)
            found.append(pytest.param(package.name, marks=() if is_quick else pytest.mark.slow))
    return found


def classes_of(family: str) -> list[type[nn.Module]]:
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    return [
        each
        for each in vars(module).values()
        if isinstance(each, type) and hasattr(each, "_apply_gate") and each.__name__ in dir(module)
    ]


def config(**fields: Any) -> SimpleNamespace:
    """Return all fields that any module looks for; some sizes are one number, others two."""
    names = {"num_experts": NUM_EXPERTS, "num_local_experts": NUM_EXPERTS, "hidden_size": HIDDEN}
    names |= {"n_routed_experts": NUM_EXPERTS, "moe_num_experts": NUM_EXPERTS}
    names |= {"moe_hidden_size": HIDDEN, "intermediate_size": INNER, "moe_intermediate_size": INNER}
    activations = {"hidden_act": "silu", "hidden_activation": "gelu_pytorch_tanh"}
    numbers = {"swiglu_limit": LIMIT, "swiglu_alpha": 1.702, "post_norm_eps": 1e-6}
    numbers |= {"mlp_gate_softcap": 3.0, "mlp_up_softcap": 3.0}
    rest = {"mlp_hidden_act": "relu2", "moe_latent_size": None, "_experts_implementation": "eager"}
    return SimpleNamespace(**{**names, **activations, **numbers, **rest, **fields})


def built(kind: type[nn.Module], dtype: torch.dtype = torch.float32, **fields: Any) -> Any:
    torch.manual_seed(0)
    module: Any = kind(config(**fields))
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module.to(dtype)


def tokens(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Some have the same expert twice, and the last expert has none."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(11, HIDDEN, generator=generator).to(dtype)
    ids = torch.randint(0, NUM_EXPERTS - 1, (11, 3), generator=generator)
    return x, ids, torch.rand(11, 3, generator=generator).to(dtype)


def check(module: Any, native: bool) -> None:
    inputs = tokens()
    with torch.inference_mode():
        expected = module(*inputs)
        spec = spec_of(module)
        first = module.gate_up_proj if module.has_gate else module.up_proj
        reference = experts_reference(*inputs, first, module.down_proj, spec)
        torch.testing.assert_close(reference, expected, atol=2e-5, rtol=1e-5)
        prepare(module, native)
        module.config._experts_implementation = NAME
        torch.testing.assert_close(module(*inputs), expected, atol=2e-5, rtol=1e-5)
        assert not {"gate_up_proj", "up_proj", "down_proj"} & set(dict(module.named_parameters()))


@pytest.mark.timeout(120)  # imports a whole family
@pytest.mark.parametrize("native", WAYS)
@pytest.mark.parametrize("family", families())
def test_the_experts_of_a_family_compute_what_transformers_does(family: str, native: bool) -> None:
    for kind in classes_of(family):
        if family in REFUSED:
            with pytest.raises(ValueError, match=f"{kind.__name__}: .*{REFUSED[family]}"):
                prepare(built(kind), native)
        else:
            check(built(kind), native)


@pytest.mark.parametrize("native", WAYS)
@pytest.mark.parametrize(
    "activation", ["silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu",
    "relu2"],
)  # fmt: skip
def test_activations_are_recognised(activation: str, native: bool) -> None:
    (gated,), (plain,) = classes_of("mixtral"), classes_of("nemotron_h")
    check(built(gated, hidden_act=activation), native)
    check(built(plain, mlp_hidden_act=activation), native)


@pytest.mark.parametrize("activation", ["mish", "tanh", "gelu_10", "linear"])
def test_other_activations_are_refused(activation: str) -> None:
    (gated,), (plain,) = classes_of("mixtral"), classes_of("nemotron_h")
    with pytest.raises(ValueError, match="MixtralExperts: its activation"):
        spec_of(built(gated, hidden_act=activation))
    with pytest.raises(ValueError, match="NemotronHExperts: its activation"):
        spec_of(built(plain, mlp_hidden_act=activation))


def test_a_limit_that_only_large_numbers_reach_is_noticed() -> None:
    (kind,) = classes_of("mixtral")
    module = built(kind)
    plain = module._apply_gate
    assert spec_of(module).limit is None
    module._apply_gate = lambda gate_up: plain(gate_up.clamp(max=50))
    with pytest.raises(ValueError, match="its activation is not supported"):
        spec_of(module)


def test_no_two_activations_are_taken_for_each_other() -> None:
    (kind,) = classes_of("mixtral")
    numbers = torch.linspace(-9, 9, 999)[:, None]
    for name in ("gelu", "gelu_new", "quick_gelu", "silu", "relu", "relu2"):
        found = spec_of(built(kind, hidden_act=name))
        both = torch.cat((numbers, torch.ones_like(numbers)), -1)
        torch.testing.assert_close(activated(both, found), ACT2FN[name](numbers))


def test_the_form_of_gpt_oss_is_read_off_its_module() -> None:
    (kind,) = classes_of("gpt_oss")
    spec = spec_of(built(kind, swiglu_limit=7.0))
    expected = {"alpha": 1.702, "limit": 7.0, "up_offset": 1.0, "activation": "silu"}
    assert {name: getattr(spec, name) for name in expected} == expected
    assert spec.is_interleaved
    assert spec.is_transposed
    assert isinstance(spec, ExpertsSpec)


@needs_native
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_bfloat16_experts_are_as_near_as_those_of_transformers(family: str) -> None:
    (kind,) = classes_of(family)
    module = built(kind, torch.bfloat16)
    inputs = tokens(torch.bfloat16)
    with torch.inference_mode():
        exact = experts_reference(*inputs, module.gate_up_proj, module.down_proj, spec_of(module))
        theirs = module(*inputs)
        prepare(module, native=True)
        module.config._experts_implementation = NAME
        ours = module(*inputs)

    def distance(out: torch.Tensor) -> float:
        return float((out - exact).float().norm())

    assert distance(ours) <= distance(theirs)


TINY: Final = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
MODELS: Final[dict[str, dict[str, Any]]] = {
    "mixtral": {"num_local_experts": 5},
    "qwen3_moe": {"num_experts": 5, "moe_intermediate_size": 40, "num_experts_per_tok": 3},
    "gpt_oss": {"num_local_experts": 5, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("native", WAYS)
@pytest.mark.parametrize("family", sorted(MODELS))
def test_a_whole_model_computes_the_same_logits(family: str, native: bool) -> None:
    torch.manual_seed(0)
    settings = transformers.AutoConfig.for_model(family, **TINY, **MODELS[family])
    model = transformers.AutoModelForCausalLM.from_config(settings).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    ids = torch.randint(0, 60, (2, 13))
    with torch.inference_mode():
        model.set_experts_implementation("eager")
        expected = model(ids).logits
        layers = [each for each in model.modules() if hasattr(each, "_apply_gate")]
        for layer in layers:
            prepare(layer, native)
        model.set_experts_implementation(NAME)
        actual = model(ids).logits
    assert len(layers) == 2
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    assert float(expected.std()) > 0.1

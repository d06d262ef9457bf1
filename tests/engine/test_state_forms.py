"""Mixers over flat tokens against the modules' own forward, row by row."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import transformers
from transformers.models.bamba.modeling_bamba import BambaMixer
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1Mixer
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import (
    GraniteMoeHybridMambaLayer,
)
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridGatedDeltaNet
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from tokenmesh.engine.models.tree.mixers import FORMS, MixerPort, has_flat_form, wrap
from tokenmesh.engine.models.tree.run import (
    CONV,
    RECURRENT,
    ModulePlace,
    Run,
    RunCache,
)
from tokenmesh.kernels.state_rows import StateRows

HIDDEN, LAYERS = 32, 2
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
_MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_expand": 2,
}
_FALCON = {**_MAMBA, "mamba_d_ssm": 64}
_MAMBA2 = {"num_heads": 4, "head_dim": 16, "n_groups": 2, "state_size": 16, "expand": 2}
_NEMOTRON = {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
_HYBRID = {"layer_types": ["mamba", "attention"]}
MIXERS: dict[str, tuple[type[torch.nn.Module], str, dict[str, Any]]] = {
    "qwen3_next": (Qwen3NextGatedDeltaNet, "Qwen3NextConfig", {**_DELTA, **_LINEAR}),
    "qwen3_5": (Qwen3_5GatedDeltaNet, "Qwen3_5TextConfig", {**_DELTA, **_LINEAR}),
    "olmo_hybrid": (OlmoHybridGatedDeltaNet, "OlmoHybridConfig", {**_DELTA, **_LINEAR}),
    "kimi_linear": (
        KimiLinearDeltaAttention,
        "KimiLinearConfig",
        {"linear_num_heads": 2, "linear_head_dim": 16, **_LINEAR},
    ),
    "mamba2": (Mamba2Mixer, "Mamba2Config", _MAMBA2),
    "bamba": (BambaMixer, "BambaConfig", _MAMBA),
    "falcon_h1": (FalconH1Mixer, "FalconH1Config", {**_FALCON, "mamba_rms_norm": False}),
    "falcon_h1_norm": (FalconH1Mixer, "FalconH1Config", {**_FALCON, "mamba_rms_norm": True}),
    "granitemoehybrid": (GraniteMoeHybridMambaLayer, "GraniteMoeHybridConfig", _MAMBA),
    "nemotron_h": (NemotronHMamba2Mixer, "NemotronHConfig", _NEMOTRON),
    "lfm2": (Lfm2ShortConv, "Lfm2Config", {"layer_types": ["conv", "full_attention"]}),
}


def mixer(name: str) -> torch.nn.Module:
    """Tiny, with weights that matter."""
    kind, config_name, sizes = MIXERS[name]
    config = getattr(transformers, config_name)(
        hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=4, **sizes
    )
    torch.manual_seed(0)
    module = kind(config, 0).eval()
    if isinstance(module, FalconH1Mixer):  # the model gives it to its mixers
        module.mup_vector = 0.5 + torch.rand(module.in_proj.out_features)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape) / 4)
    return module


def states_of(module: Any, slots: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """NaN in the shapes of a state: a new row's may not be read."""
    conv = next(each for each in module.modules() if isinstance(each, torch.nn.Conv1d))
    kept = torch.full((slots, conv.in_channels, conv.kernel_size[0]), float("nan"))
    if isinstance(module, Lfm2ShortConv):
        return kept, None
    if hasattr(module, "ssm_state_size"):
        shape = (module.num_heads, module.head_dim, module.ssm_state_size)
    elif isinstance(module, KimiLinearDeltaAttention):
        shape = (module.num_heads, module.head_dim, module.head_dim)
    else:
        shape = (module.num_v_heads, module.head_k_dim, module.head_v_dim)
    return kept, torch.full((slots, *shape), float("nan"))


def port_of(module: torch.nn.Module, conv: torch.Tensor, recurrent: Any) -> MixerPort:
    """Runs the module by kernels, over these states."""
    run = Run(store=cast("Any", SimpleNamespace(layers=[[conv, recurrent]])))
    port = wrap(module, run, RunCache(run))
    port.places[CONV, 0] = ModulePlace(run, 0, 0)
    if recurrent is not None:
        port.places[RECURRENT, 0] = ModulePlace(run, 0, 1)
    port.take_form(FORMS[0])
    return port


@pytest.mark.parametrize("name", MIXERS)
@torch.inference_mode()
def test_flat_mixer_equals_the_module_row_by_row(name: str) -> None:
    module = mixer(name)
    lengths, slots = (70, 3, 12), [4, 0, 2]
    hidden = [torch.randn(length, HIDDEN) for length in lengths]
    expected = [module(each[None])[0] for each in hidden]
    conv, recurrent = states_of(module, 5)
    port = port_of(module, conv, recurrent)
    parts: list[list[torch.Tensor]] = [[] for _ in hidden]
    starts = [0, 0, 0]
    for counts in ((66, 1, 5), (1, 1, 0), (2, 0, 6), (1, 1, 1)):  # chunks, decoding, both
        tokens = torch.cat(
            [
                each[start : start + count]
                for each, start, count in zip(hidden, starts, counts, strict=True)
            ]
        )
        rows = StateRows.of(slots, starts, list(counts))
        port.run.step = cast("Any", SimpleNamespace(state_rows=rows))
        out = port.forward(tokens[None], {})[0]
        for row, part in enumerate(torch.split(out, list(counts))):
            parts[row].append(part)
            starts[row] += counts[row]
    assert tuple(starts) == lengths
    for row, whole in enumerate(expected):
        torch.testing.assert_close(torch.cat(parts[row]), whole, atol=2e-5, rtol=2e-5)
    assert conv[[1, 3]].isnan().all()


def test_a_mixer_with_another_recurrence_has_no_kernels() -> None:
    config = transformers.MambaConfig(hidden_size=HIDDEN, num_hidden_layers=1, state_size=8)
    module = MambaMixer(config, 0)
    assert not has_flat_form(type(module))

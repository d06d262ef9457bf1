"""Cases of moe whose weights are codes."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import torch

from tests.kernels.case import Inputs, KernelCase, Make, normal
from tests.kernels.cases.quantized_linear import E2M1, Form, draw_codes
from tokenmesh.kernels.codes import Codes
from tokenmesh.kernels.moe.device_experts import DeviceExperts
from tokenmesh.kernels.moe.reference import experts_reference
from tokenmesh.kernels.moe.spec import ExpertsSpec
from tokenmesh.kernels.moe.triton import experts
from tokenmesh.kernels.quantized_linear.device_codes import DeviceCodes

TOLERANCE: Final = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Absolute tolerances for outputs of about 1 to 5."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """Experts of one format; the outputs and inputs of a form count for nothing."""

    form: Form
    spec: ExpertsSpec = ExpertsSpec()  # noqa: RUF009
    tokens: int = 5
    top_k: int = 2
    experts: int = 3
    hidden: int = 96
    inner: int = 80
    has_bias: bool = False
    plain: str = ""
    """The product whose weights are plain."""


_GPT_OSS: Final = ExpertsSpec(alpha=1.702, limit=1.5, up_offset=1.0)
_NO_GATE: Final = ExpertsSpec(activation="relu2", is_gated=False)
_INT4: Final = Form(0, 0, 0, 32)
_FP4: Final = replace(_INT4, kind="table", center=12, table=E2M1)
_INT8: Final = Form(0, 0, 0, 1 << 20, 8, center=128)
_FP8: Final = Form(0, 0, 0, 1 << 20, 8, kind="e4m3", center=0)
_LAYERS: Final[Mapping[str, _Layer]] = {
    "int4": _Layer(_INT4, hidden=96, inner=160),
    "awq-many": _Layer(
        replace(_INT4, has_offsets=True), tokens=70, experts=2, hidden=128, inner=64
    ),
    "gptq-act-order": _Layer(replace(_INT4, has_order=True, has_offsets=True), inner=64),
    "mxfp4-gpt-oss": _Layer(
        replace(_FP4, scales=torch.bfloat16), _GPT_OSS, tokens=9, inner=160, has_bias=True
    ),
    "nvfp4-no-gate": _Layer(replace(_FP4, group=16), _NO_GATE, top_k=1, inner=112, has_bias=True),
    "int8-channel": _Layer(_INT8),
    "int8-many": _Layer(_INT8, tokens=45, experts=2),
    "fp8-channel": _Layer(_FP8),
    "fp8-block": _Layer(replace(_FP8, group=128), hidden=192, inner=160),
    "mxfp8": _Layer(replace(_FP8, group=32), inner=64),
    "codes-first": _Layer(_INT4, inner=72, plain="w2"),
    "codes-second": _Layer(_INT4, hidden=80, inner=96, plain="w13"),
}


def coded_cases() -> list[KernelCase]:
    """Every kind of codes, in few tiles and many, and mixed with plain weights."""
    return [_case(name, layer) for name, layer in _LAYERS.items()]


def _case(name: str, layer: _Layer) -> KernelCase:
    def run(a: Inputs, compute: Any) -> dict[str, torch.Tensor]:
        w13, w2 = (_joined(a, name) for name in ("w13", "w2"))
        spec = replace(layer.spec, b13=a["b13"], b2=a["b2"])
        return {"out": compute(a["x"], a["ids"], a["weights"], w13, w2, spec)}

    return KernelCase(
        name=f"coded-{name}",
        make=_make(layer),
        run=lambda a: run(a, experts),
        reference=lambda a: run(a, experts_reference),
        tolerance=TOLERANCE,
    )


def _make(layer: _Layer) -> Make:
    slices = 2 if layer.spec.is_gated else 1

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        def stack(name: str, slices: int, outputs: int, inputs: int) -> Inputs:
            if name == layer.plain:
                shape = (layer.experts, slices * outputs, inputs)
                # rows of plain weights are aligned
                wide = normal((*shape[:2], -(-inputs // 16) * 16), dtype, device, generator)
                return {name: wide[..., :inputs].mul_(inputs**-0.5)}
            group = min(layer.form.group, inputs)
            form = replace(layer.form, outputs=outputs, inputs=inputs, group=group)
            drawn = [
                [draw_codes(form, device, generator) for _ in range(slices)]
                for _ in range(layer.experts)
            ]
            packed = DeviceExperts.pack(
                [_of_one_order(each) for each in drawn], layer.experts, device
            )
            return _apart(packed, name)

        pairs = (layer.tokens, layer.top_k)
        drawn = torch.rand(pairs, device=device, generator=generator)
        b13 = normal((layer.experts, slices * layer.inner), dtype, device, generator)
        b2 = normal((layer.experts, layer.hidden), dtype, device, generator)
        wide = -(-layer.hidden // 16) * 16
        x = normal((layer.tokens, wide), dtype, device, generator)[:, : layer.hidden]
        return {
            "x": x,
            # one more than there are experts, and -1
            "ids": (drawn * (layer.experts + 2)).floor().long() - 1,
            "weights": torch.rand(pairs, device=device, generator=generator),
            "b13": b13 if layer.has_bias else None,
            "b2": b2 if layer.has_bias else None,
            **stack("w13", slices, layer.inner, layer.hidden),
            **stack("w2", 1, layer.hidden, layer.inner),
        }

    return make


def _of_one_order(slices: list[Codes]) -> list[Codes]:
    """Gate and up of an expert read the same inputs, in one order."""
    return [replace(each, order=slices[0].order) for each in slices]


def _apart(experts: DeviceExperts, name: str) -> Inputs:
    """The parts of a stack as arguments."""
    own = {f"{name}.{each.name}": getattr(experts.codes, each.name) for each in fields(DeviceCodes)}
    own[f"{name}.order"] = experts.order
    return {**own, f"{name}.experts": experts.num_experts}


def _joined(a: Inputs, name: str) -> torch.Tensor | DeviceExperts:
    if name in a:
        found: torch.Tensor = a[name]
        return found
    own = {each.name: a[f"{name}.{each.name}"] for each in fields(DeviceCodes)}
    order = own.pop("order")
    return DeviceExperts(DeviceCodes(**own, order=None), order, a[f"{name}.experts"])

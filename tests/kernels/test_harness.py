"""The harness itself: every fault it is there for makes it fail."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.case import EXACT, Inputs, KernelCase, Outputs
from tests.kernels.checks import check
from tests.kernels.discovery import compilation_named, ops
from tests.kernels.interpreter import Interpreter
from tests.kernels.sass import compile_for_hopper
from tokenmesh.kernels import silu_mul
from tokenmesh.kernels.dispatch import interpreted_on_cpu, uses_triton


def doubling(run: Callable[[Inputs], Outputs]) -> KernelCase:
    """out = 2 * x over padded rows of 5 in 8, and y stays as it is."""

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        wide = torch.randn((3, 8), dtype=dtype, device=device, generator=generator)
        out = torch.zeros((3, 8), dtype=dtype, device=device)
        return {"x": wide[:, :5], "y": wide.sum(1), "out": out[:, :5], "eps": 0.5}

    return KernelCase("doubling", make, run, lambda a: {"out": 2 * a["x"]}, EXACT)


def correct(a: Inputs) -> Outputs:
    a["out"].copy_(2 * a["x"])
    return {"out": a["out"]}


def into_new_memory(a: Inputs) -> Outputs:
    out = torch.empty(a["x"].shape)
    out[:, 1:] = 2 * a["x"][:, 1:]
    return {"out": out}


def past_the_end(a: Inputs) -> Outputs:
    beyond = a["out"].storage_offset() + 3 * 8
    a["out"].as_strided((1,), (1,), beyond).fill_(1.0)
    return correct(a)


def before_the_start(a: Inputs) -> Outputs:
    a["y"].as_strided((1,), (1,), a["y"].storage_offset() - 1).zero_()
    return correct(a)


def into_the_padding(a: Inputs) -> Outputs:
    a["out"].as_strided((3, 6), (8, 1)).zero_()
    return correct(a)


def into_another_input(a: Inputs) -> Outputs:
    a["y"].neg_()
    return correct(a)


def from_the_padding(a: Inputs) -> Outputs:
    wide = a["x"].as_strided((3, 8), (8, 1))
    a["out"].copy_(2 * a["x"] + 0 * wide.sum(1, keepdim=True))
    return {"out": a["out"]}


def past_the_end_of_new_memory(a: Inputs) -> Outputs:
    out = torch.empty(15)
    out.as_strided((16,), (1,)).zero_()
    return {"out": out.view(3, 5).copy_(2 * a["x"])}


def in_another_dtype(a: Inputs) -> Outputs:
    return {"out": correct(a)["out"].double()}


def test_a_correct_op_passes() -> None:
    check(doubling(correct), torch.float32, "cpu")


@pytest.mark.parametrize(
    "run",
    [
        into_new_memory,
        past_the_end,
        before_the_start,
        into_the_padding,
        into_another_input,
        from_the_padding,
        past_the_end_of_new_memory,
        in_another_dtype,
        lambda a: {},
    ],
)
def test_a_fault_is_found(run: Callable[[Inputs], Outputs]) -> None:
    with pytest.raises(AssertionError):
        check(doubling(run), torch.float32, "cpu")


def test_views_of_one_storage_stay_views_of_one_storage() -> None:
    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        wide = torch.randn((3, 8), dtype=dtype, device=device, generator=generator)
        return {"left": wide[:, :4], "right": wide[:, 4:]}

    def run(a: Inputs) -> Outputs:
        both = a["left"].as_strided((3, 8), (8, 1))
        return {"sum": both.sum(1)}

    case = KernelCase(
        "halves", make, run, lambda a: {"sum": torch.cat([a["left"], a["right"]], 1).sum(1)}, EXACT
    )
    check(case, torch.float32, "cpu")


@pytest.mark.timeout(120)
def test_wide_loads_are_lost_without_the_hints() -> None:
    whole = compilation_named("silu_mul", "bf16")
    assert compile_for_hopper(whole).count(r"LDG\.E\.128")
    blind = compile_for_hopper(replace(whole, divisible_by_16=()))
    assert blind.count("LDG")
    assert not blind.count(r"LDG\.E\.128")


def test_discovery_finds_ops() -> None:
    assert {"rms_norm", "silu_mul", "rope"} <= set(ops())


def _interpreted_silu_mul(x: torch.Tensor) -> tuple[bool, torch.Tensor]:
    with interpreted_on_cpu():
        return uses_triton(x), silu_mul.silu_mul(x)


@pytest.mark.timeout(120)  # waits for the child to import torch
def test_ops_on_cpu_tensors_can_be_sent_to_the_interpreter(interpreter: Interpreter) -> None:
    x = torch.randn(2, 32)
    assert not uses_triton(x)
    was_sent, out = interpreter.call(_interpreted_silu_mul, x, timeout_s=100)
    assert was_sent
    torch.testing.assert_close(out, silu_mul.silu_mul_reference(x))

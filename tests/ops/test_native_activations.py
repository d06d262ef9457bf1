"""The gated activations of the C kernels against the references of torch's ops."""

from collections.abc import Callable
from typing import Final

import pytest
import torch

from tests.ops.native import in_avx2, needs_native
from tokenmesh.kernels import gelu_mul, silu_mul
from tokenmesh.kernels.native import Kind, Op, Program, ProgramInputs, ProgramModel

REFERENCES: Final[dict[Kind, Callable[[torch.Tensor], torch.Tensor]]] = {
    Kind.SILU_MUL: silu_mul.silu_mul_reference,
    Kind.GELU_MUL: lambda gate_up: gelu_mul.gelu_mul_reference(gate_up, "none"),
    Kind.GELU_TANH_MUL: lambda gate_up: gelu_mul.gelu_mul_reference(gate_up, "tanh"),
}

pytestmark = [needs_native, in_avx2]


def run(kind: Kind, gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2F] -> [T, F]."""
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    buffer = gate_up.clone()
    is_bf16 = gate_up.dtype == torch.bfloat16
    # a result may take its own gate's place
    program = Program(
        ProgramModel(is_bf16, 1, 1, 16), [Op(kind=kind, width=width)], [2 * width], []
    )
    tables = torch.zeros(1, 1, dtype=torch.int64)
    inputs = ProgramInputs([0], [num_tokens], [0], [tables], [], None)
    program.run(buffer, inputs, torch.zeros(1, 2, 1, 1, 16, 16, dtype=gate_up.dtype))
    return buffer[:, :width]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1, 16, 37, 3000])
@pytest.mark.parametrize("kind", REFERENCES, ids=lambda kind: kind.name)
def test_it_equals_the_reference(kind: Kind, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate_up = (4 * torch.randn(7, 2 * width)).to(dtype)
    gate_up[0, :width] = torch.linspace(-200, 200, width).to(dtype)
    tolerance = gelu_mul.TOLERANCE[dtype]
    result, expected = run(kind, gate_up), REFERENCES[kind](gate_up)
    torch.testing.assert_close(result, expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(run(kind, gate_up[3:4]), result[3:4])


@pytest.mark.parametrize("kind", REFERENCES, ids=lambda kind: kind.name)
def test_a_gate_that_is_nan_reaches_the_result(kind: Kind) -> None:
    gate_up = torch.ones(1, 40)
    gate_up[0, 3] = torch.nan
    result = run(kind, gate_up)
    assert result[0, 3].isnan()
    assert result.isnan().sum() == 1

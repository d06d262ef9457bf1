"""Numbers in other types are those of torch, and quantized ones are close."""

from array import array

import numpy
import pytest
import torch

from tokenmesh.services.gateway.apis.pooling.fields import EmbedDtype
from tokenmesh.services.gateway.core.pooling.arrays import cosines, max_sims, quantized, to_bytes
from tokenmesh.shared.messages.pooling import Pooled

TYPES: dict[EmbedDtype, torch.dtype] = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def pooled(values: torch.Tensor) -> Pooled:
    return Pooled(list(values.shape), values.numpy().astype("<f4").tobytes())


def sample() -> torch.Tensor:
    """Numbers of all sizes, with those between two 8-bit floats and at their borders."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(4096, generator=generator) * 10.0 ** torch.randint(
        -6, 6, (4096,), generator=generator
    )
    codes = torch.arange(256, dtype=torch.uint8)
    exact = torch.cat(
        [codes.view(dtype).float() for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)]
    )
    exact = exact[torch.isfinite(exact)].sort().values
    middles = (exact[1:] + exact[:-1]) / 2
    edges = torch.tensor([448.0, 463.9, 464.0, 464.1, 57344.0, 61439.0, 61440.0, 61441.0])
    return torch.cat([spread, exact, middles, edges, -edges, torch.zeros(1), -torch.zeros(1)])


@pytest.mark.parametrize("name", TYPES)
def test_types_are_those_of_torch(name: EmbedDtype) -> None:
    values = sample()
    found = to_bytes(pooled(values), name, is_big_endian=False)
    wanted = values.to(TYPES[name])
    given = torch.frombuffer(bytearray(found), dtype=TYPES[name])
    assert torch.equal(torch.isnan(given.float()), torch.isnan(wanted.float()))
    known = ~torch.isnan(wanted.float())
    assert torch.equal(given.float()[known], wanted.float()[known])


def test_bytes_are_swapped() -> None:
    values = torch.tensor([1.0, -2.5])
    for name in ("float32", "float16", "bfloat16"):
        size = 4 if name == "float32" else 2
        little = to_bytes(pooled(values), name, is_big_endian=False)
        big = to_bytes(pooled(values), name, is_big_endian=True)
        parts = [little[start : start + size][::-1] for start in range(0, len(little), size)]
        assert big == b"".join(parts)


def test_quantized_embeddings_point_in_the_same_direction() -> None:
    values = torch.nn.functional.normalize(torch.randn(384), dim=0)
    for kind, offset in (("int8", 0), ("uint8", 128)):
        steps = torch.tensor(quantized(pooled(values), kind)) - offset
        assert torch.cosine_similarity(steps.float(), values, dim=0) > 0.99
    assert quantized(pooled(torch.tensor([1.0, -1.0, 2.0])), "int8") == [127, -127, 127]
    bits = quantized(pooled(torch.tensor([1.0] + [-1.0] * 7)), "ubinary")
    assert bits == [128]


def test_similarities_are_those_of_torch() -> None:
    torch.manual_seed(0)
    one, others = torch.randn(8), torch.randn(5, 8)
    found = cosines(pooled(one), [pooled(each) for each in others])
    wanted = torch.cosine_similarity(one[None], others)
    assert found == pytest.approx(wanted.tolist(), abs=1e-6)
    assert cosines(pooled(one), [pooled(torch.zeros(8))]) == [0.0]
    query, documents = torch.randn(3, 8), [torch.randn(n, 8) for n in (1, 4, 9)]
    sums = [(query @ each.T).max(dim=1).values.sum().item() for each in documents]
    assert max_sims(pooled(query), [pooled(each) for each in documents]) == pytest.approx(
        sums, abs=1e-5
    )


def test_an_array_shares_the_bytes_of_an_answer() -> None:
    values = array("f", [1.0, 2.0, 3.0, 4.0])
    found = numpy.frombuffer(Pooled([2, 2], values.tobytes()).data, "<f4")
    assert found.tolist() == values.tolist()

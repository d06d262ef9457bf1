"""Quantized weights on two ranks: each format is cut where its numbers stay what they are."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Final

import pytest
import torch

from benchmarks.bench_ranks import NoGroup
from tests.engine.test_quantized_experts import CASES, written
from tests.fakes.general_models import HEADS
from tests.fakes.models import Fake, make_fake
from tests.fakes.quantized import write_checkpoint
from tests.fakes.quantized_schemes import SCHEMES
from tests.fakes.rank_runs import both, jobs
from tests.fakes.tiny import Tiny
from tests.rounds import some
from tokenmesh.engine.exec.build import build_runner
from tokenmesh.engine.exec.role import ALONE_ROLE, Role
from tokenmesh.engine.models.checkpoint import Checkpoint
from tokenmesh.engine.models.native.decoder import Decoder
from tokenmesh.engine.models.quantization.read import read_quantization
from tokenmesh.engine.models.raw_config import read_config
from tokenmesh.engine.ranks.ranks import Ranks
from tokenmesh.kernels.codes import Codes
from tokenmesh.kernels.native import NativeCodes
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.config.worker import WorkerSettings

# the scales of groups of 16, 24, 32 and 40 inputs do not all end where a rank's part does
SIZES: Final = {"intermediate_size": 96, "num_hidden_layers": 2}
QUICK: Final = frozenset(
    ("fp8_block", "gptq4", "gptq_desc_act", "awq", "pack4_zeros", "int8", "nf4", "mxfp4")
)

Quantized = Callable[[str], Path]


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Quantized:
    """A scheme's checkpoint."""

    @cache
    def source() -> Path:
        directory = tmp_path_factory.mktemp("qwen2")
        make_fake(Fake("Qwen2", SIZES), HEADS).save_pretrained(directory)
        return directory

    def get(scheme: str) -> Path:
        directory = tmp_path_factory.mktemp(scheme)
        write_checkpoint(source(), directory / "codes", directory / "plain", SCHEMES[scheme])
        return directory / "codes"

    return get


@pytest.mark.parametrize(
    "scheme",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SCHEMES],
)
def test_two_ranks_compute_what_one_does_in_each_format(quantized: Quantized, scheme: str) -> None:
    both(quantized(scheme), jobs(), max_num_batched_tokens=32).close()


@some(CASES, {"qwen2_moe"})
def test_experts_are_divided_in_each_format(tmp_path: Path, name: str) -> None:
    directory, _ = written(name, CASES[name], tmp_path)
    both(directory, jobs(), max_num_batched_tokens=32).close()


@pytest.mark.parametrize("scheme", ["gptq4", pytest.param("fp8_block", marks=pytest.mark.slow)])
def test_trees_multiply_with_codes_of_their_part(quantized: Quantized, scheme: str) -> None:
    many = both(quantized(scheme), jobs(), model_impl="transformers")
    model = many.model.resident._model
    assert isinstance(model, Decoder)
    assert isinstance(model.layers[0].attention.out.weight, NativeCodes)
    many.close()


@pytest.mark.parametrize("rounding", ["int8", "int4", "fp8"])
def test_weights_are_rounded_before_they_are_divided(tiny: Tiny, rounding: str) -> None:
    both(tiny("llama").directory, jobs(), quantization=rounding).close()


def test_columns_of_codes_are_those_of_their_weight() -> None:
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randint(0, 16, (6, 96), generator=generator, dtype=torch.uint8)
    for size in (96, 48, 40, 32, 24, 16):
        count = -(-96 // size)
        scales = torch.rand((6, count), generator=generator)
        codes = Codes(numbers, 4, scales, size, offsets=-scales, center=8)
        for world in (2, 3, 4, 6):
            width = 96 // world
            for first in range(0, 96, width):
                part = slice(first, first + width)
                cut = codes.columns(part)
                assert cut is not None
                torch.testing.assert_close(cut.decoded(), codes.decoded()[:, part], atol=0, rtol=0)


@pytest.mark.parametrize(
    "scheme",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SCHEMES],
)
def test_any_part_of_a_stored_matrix_is_read_without_the_rest(
    quantized: Quantized, scheme: str
) -> None:
    directory, random = quantized(scheme), Random(1)
    how = read_quantization(read_config(directory))
    assert how is not None

    def opened() -> Checkpoint:
        checkpoint = Checkpoint(directory)
        checkpoint.decode(how)
        return checkpoint

    names = [name for name in opened().shapes() if opened().is_encoded(name)]
    for name in names[:7]:
        outputs, inputs = opened().decoded_shape(name)
        whole = torch.empty(outputs, inputs)
        reader = opened()
        reader.take_into(name, whole)
        num_bytes = reader.bytes_read
        for _ in range(4):
            rows, columns = (part_of(size, random) for size in (outputs, inputs))
            part = torch.empty(rows.stop - rows.start, columns.stop - columns.start)
            reader = opened()
            reader.take_part(name, (outputs, inputs), rows, columns, part)
            assert torch.equal(part, whole[rows, columns])
            assert reader.bytes_read <= num_bytes
            codes = opened().take_codes([(name, outputs)], inputs, [(rows,)], columns)
            if codes is not None:
                found = codes.decoded()
                expected = whole[rows] if found.shape[1] == inputs else part
                torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def part_of(size: int, random: Random) -> slice:
    """Half of the time a half, else any part."""
    first = random.randrange(2) * (size // 2)
    if random.random() < 0.5:
        return slice(first, first + size // 2)
    first = random.randrange(size)
    return slice(first, random.randint(first + 1, size))


@pytest.mark.parametrize("scheme", ["fp8_block", "gptq4", "awq", "pack4_zeros", "mxfp4"])
def test_each_of_two_ranks_reads_about_half_of_the_codes(quantized: Quantized, scheme: str) -> None:
    directory, role = quantized(scheme), Role(Ranks(1, 2, NoGroup()), 2)
    model = ModelSettings(model=str(directory), dtype="float32")
    worker = WorkerSettings(device="cpu", num_gpu_blocks_override=32)
    whole, part = (
        build_runner(model, worker, lambda done, total: None, each).times.num_bytes
        for each in (ALONE_ROLE, role)
    )
    assert part <= 0.6 * whole, "norms and what lies across a border are on both"

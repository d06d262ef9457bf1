"""A rank of two takes half of the memory and of the files that a whole model takes."""

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
import torch

from tests.fakes.models import Fake, make_fake
from tests.fakes.quantized import write_checkpoint
from tests.fakes.quantized_schemes import SCHEMES
from tests.fakes.tiny import Tiny

MOST_OF_ONE: Final = 0.55
HEADS: Final = {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64}
SIZES: Final = {
    **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 8},
    **{"vocab_size": 8192, "tie_word_embeddings": False},
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 150 MB."""
    directory = tmp_path_factory.mktemp("plain")
    make_fake(Fake("Qwen2", SIZES), HEADS).to(torch.bfloat16).save_pretrained(directory)
    return directory


def peak(small: Path, directory: Path, world: int) -> tuple[int, int]:
    """Bytes of memory and bytes read."""
    words = [str(small), str(directory), str(world)]
    made = subprocess.run(
        [sys.executable, "-m", "tests.fakes.load_peak", *words],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    memory, read = map(int, made.stdout.split()[-2:])
    return memory, read


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "form",
    [
        "plain",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("gptq4", "fp8_block", "awq")),
    ],
)
def test_a_rank_of_two_takes_half_of_the_memory_at_its_peak(
    tiny: Tiny, plain: Path, tmp_path: Path, form: str
) -> None:
    directory = plain
    if form != "plain":
        directory = tmp_path / "codes"
        write_checkpoint(plain, directory, tmp_path / "decoded", SCHEMES[form])
    small = tiny("qwen2").directory
    whole, part = (peak(small, directory, world) for world in (1, 2))
    shown = f"{part[0] / whole[0]:.3f} of the memory, {part[1] / whole[1]:.3f} of the bytes"
    print(f"{form}: {shown}")  # noqa: T201
    assert part[0] <= MOST_OF_ONE * whole[0], shown
    assert part[1] <= MOST_OF_ONE * whole[1], shown

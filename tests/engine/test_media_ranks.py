"""Language models of models that see or hear, on two ranks: the tokens of one rank."""

from pathlib import Path
from typing import Final

import pytest

from tests.engine.test_media_families import audio_family, image_family
from tests.fakes.audio_models import AUDIO
from tests.fakes.media_models import MEDIA, media_checkpoint
from tests.fakes.ranks import RanksDriver
from tests.rounds import some
from tokenmesh.shared.errors import ConfigError

pytestmark = pytest.mark.timeout(60)
WIDE_HEADS: Final = ("qwen2_vl", "qwen2_5_vl")
"""Their heads are as wide as the model over their number, whatever the config says."""


@some([name for name in (*MEDIA, *AUDIO) if name not in WIDE_HEADS], {"qwen3_vl"})
def test_prompts_with_media_go_on_as_on_one_rank(tmp_path: Path, name: str) -> None:
    family = image_family(tmp_path, name) if name in MEDIA else audio_family(tmp_path, name)
    jobs = family.jobs([family.items(1), family.items(1, 2), family.items()])
    two = RanksDriver(tmp_path, max_num_batched_tokens=64)
    one = family.driver.again(max_num_batched_tokens=64)
    assert two.tokens(jobs, steps_between=2) == one.tokens(jobs, steps_between=2)
    two.close()


@pytest.mark.parametrize("name", WIDE_HEADS)
def test_models_whose_heads_get_wider_where_there_are_fewer_are_refused(
    tmp_path: Path, name: str
) -> None:
    media_checkpoint(tmp_path, name)
    with pytest.raises(ConfigError, match="no test has compared parts of the model type 'qwen2"):
        RanksDriver(tmp_path)

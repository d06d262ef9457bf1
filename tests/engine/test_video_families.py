"""Models that take videos: file, frames, tower and engine together, as transformers."""

import pytest

from tests.engine.test_media_families import ImageFamily, few_blocks
from tests.engine.test_media_families import family as family
from tests.fakes.media_family import Items, several
from tokenmesh.shared.messages.media import IMAGE, VIDEO

pytestmark = pytest.mark.timeout(180)
FAST = ("qwen2_5_vl", "qwen3_vl")
NAMES = (*FAST, "qwen2_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
FAMILIES = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in NAMES]
ONE, THREE, TEXT = several(VIDEO, 1), several(VIDEO, 1, 2, 3), several(VIDEO)
MIXED: Items = ((IMAGE, 1), (VIDEO, 2), (IMAGE, 2))
each_family = pytest.mark.parametrize("family", FAMILIES, indirect=True)


@each_family
def test_prompts_and_answers_are_those_of_transformers(family: ImageFamily) -> None:
    family.check_answers([ONE, THREE, MIXED, TEXT])
    (item,) = family.job(ONE).media
    assert (item.kind, item.grid[0] >= 2) == (VIDEO, True)


@each_family
@pytest.mark.parametrize("chunk", [3, 16])
def test_chunks_may_end_anywhere_in_a_video(family: ImageFamily, chunk: int) -> None:
    family.check_chunks([MIXED, TEXT, ONE], chunk)


@each_family
def test_a_video_is_computed_once_for_equal_prompts(family: ImageFamily) -> None:
    family.check_prefix_hits(THREE, several(VIDEO, 2, 1, 3))


@each_family
def test_a_stream_goes_on_from_its_tokens_and_after_preemption(family: ImageFamily) -> None:
    family.check_resumed(THREE)
    family.check_preempted([THREE, MIXED, ONE], few_blocks(family, THREE))

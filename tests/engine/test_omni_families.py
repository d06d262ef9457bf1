"""Models that take images, videos with or without their sound, and recordings, as transformers."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from msgspec import structs

from tests.fakes.media_family import VIDEO_LIMITS, Items, several, video
from tests.fakes.omni import FILM, OPTIONS, Omni
from tests.fakes.recordings import tones
from tests.fakes.tokenizers import write_json
from tests.fakes.videos import pictures, video_file
from tokenmesh.engine.models.omni_positions import omni_positions
from tokenmesh.services.tokenizer_svc.media.jobs import job_of
from tokenmesh.services.tokenizer_svc.media.processor import ItemProcessor, PreparedItem
from tokenmesh.services.tokenizer_svc.media.recordings import RecordingProcessor
from tokenmesh.services.tokenizer_svc.media.video_child import prepare_video
from tokenmesh.shared.errors import CheckpointError, InvalidInput
from tokenmesh.shared.messages.media import AUDIO, IMAGE, VIDEO
from tokenmesh.shared.tensor_blob import decode_named

pytestmark = pytest.mark.timeout(180)
PROMPTS: dict[str, Items] = {
    "one": several(AUDIO, 1),
    "three": several(AUDIO, 1, 2, 3),
    "pictures": several(IMAGE, 1, 2, 3),
    "mixed": ((IMAGE, 1), (AUDIO, 2), (IMAGE, 2), (AUDIO, 1)),
    "text": (),
    "video": ((AUDIO, 1), (VIDEO, 1), (IMAGE, 1)),
    "films": ((FILM, 1), (AUDIO, 2), (FILM, 2), (IMAGE, 1)),
}
FAST = [PROMPTS[name] for name in ("films", "text", "mixed")]
ALL = [pytest.param(list(PROMPTS.values()), marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def omni(tmp_path_factory: pytest.TempPathFactory) -> Omni:
    return Omni.load(tmp_path_factory.mktemp("omni"))


each_selection = pytest.mark.parametrize("prompts", [FAST, *ALL], ids=["fast", "all"])


@each_selection
def test_positions_are_those_of_transformers(omni: Omni, prompts: Sequence[Items]) -> None:
    for items in prompts:
        inputs, job = omni.their_inputs(items), omni.job(items)
        lengths = inputs.get("feature_attention_mask")
        found, _ = omni.model.model.get_rope_index(
            inputs["input_ids"],
            inputs.get("image_grid_thw"),
            inputs.get("video_grid_thw"),
            inputs["attention_mask"],
            inputs.get("use_audio_in_video", False),
            None if lengths is None else lengths.sum(1),
            inputs.get("video_second_per_grid"),
        )
        ours = omni_positions(omni.model.config, job.prompt, job.media)
        torch.testing.assert_close(ours, found[:, 0].float(), rtol=0, atol=0)


@each_selection
def test_prompts_and_answers_are_those_of_transformers(
    omni: Omni, prompts: Sequence[Items]
) -> None:
    omni.check_answers(prompts)


def test_sound_is_placed_by_the_positions_a_second_that_config_json_states(
    tmp_path: Path,
) -> None:
    made = Omni.load(tmp_path, 25)
    made.check_answers([PROMPTS["films"]])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixed", "films"])
def test_logits_are_near_those_of_transformers(omni: Omni, name: str) -> None:
    omni.check_logits(PROMPTS[name], 3e-4)


@pytest.mark.parametrize(
    "chunk", [pytest.param(1, marks=pytest.mark.slow), pytest.param(7, marks=pytest.mark.slow), 16]
)
def test_chunks_may_end_anywhere(omni: Omni, chunk: int) -> None:
    omni.check_chunks(FAST, chunk)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixed", "films"])
def test_chunks_may_end_at_each_border_of_an_item(omni: Omni, name: str) -> None:
    omni.check_borders(PROMPTS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["films", "three"])
def test_an_item_is_computed_once_for_equal_prompts(omni: Omni, name: str) -> None:
    omni.check_prefix_hits(PROMPTS[name], several(AUDIO, 2, 1, 3))


def test_a_stream_goes_on_from_its_tokens_and_after_preemption(omni: Omni) -> None:
    omni.check_resumed(PROMPTS["films"])
    assert omni.check_preempted(FAST, omni.least_blocks(FAST)) > 0


def test_the_sound_of_a_video_file_stands_between_its_frames(omni: Omni) -> None:
    def prepare(data: bytes, **options: Any) -> PreparedItem:
        job = job_of(data, json.dumps({**OPTIONS, **options}).encode())
        return PreparedItem.decode(prepare_video(job, omni.processor, VIDEO_LIMITS))

    silent, frames = video(1), pictures(11, 32, 56)
    with_sound = video_file(frames, sound=tones(1.4))
    seen, heard = prepare(with_sound), prepare(with_sound, use_audio_in_video=True)
    assert seen.prepared == prepare(video_file(frames)).prepared
    tensors = decode_named(heard.features)
    is_sound = numpy.frombuffer(tensors["is_sound"].data, "<i8")
    assert is_sound.sum() == pytest.approx(1.4 * 13, abs=2)
    assert len(is_sound) - is_sound.sum() == sum(seen.prepared.runs)
    assert heard.prepared.facts == {"video_second_per_grid": pytest.approx(2 / 3)}
    with pytest.raises(InvalidInput, match="use_audio_in_video: the file holds no audio"):
        prepare(silent, use_audio_in_video=True)
    with pytest.raises(InvalidInput, match="use_audio_in_video is not true or false"):
        prepare(silent, use_audio_in_video=1)
    counted = job_of(with_sound, b'{"num_frames": 4, "use_audio_in_video": true}')
    with pytest.raises(InvalidInput, match="use_audio_in_video and num_frames exclude each other"):
        prepare_video(counted, omni.processor, VIDEO_LIMITS)


def test_items_that_do_not_fit_their_prompt_are_refused(omni: Omni) -> None:
    config, job = omni.model.config, omni.job(PROMPTS["films"])
    film, *others = job.media
    shifted = structs.replace(film, offset=film.offset + 1)
    for bad in (structs.replace(film, grid=(2, 2)), structs.replace(film, grid=(1, 4, 4)), shifted):
        with pytest.raises(ValueError, match=r"grid|order of their times"):
            omni_positions(config, job.prompt, [bad, *others])


def test_settings_that_transformers_counts_otherwise_are_refused(
    omni: Omni, tmp_path: Path
) -> None:
    directory = tmp_path / "changed"
    ignored = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(omni.directory, directory, ignore=ignored)
    config = json.loads((directory / "config.json").read_text())
    thinker = config["thinker_config"]
    thinker["audio_config"]["n_window"], thinker["position_id_per_seconds"] = 30, 0
    write_json(directory / "config.json", config)
    with pytest.raises(CheckpointError, match=r"audio_config\.n_window is 30"):
        RecordingProcessor(directory)
    with pytest.raises(CheckpointError, match="position_id_per_seconds is 0, not a positive"):
        ItemProcessor(directory)

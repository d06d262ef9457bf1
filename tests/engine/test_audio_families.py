"""Models that hear: the processor, the tower and the engine together, as transformers."""

from dataclasses import dataclass
from typing import Any

import pytest

from tests.fakes.audio_models import AUDIO as FAKES
from tests.fakes.audio_models import audio_checkpoint, audio_oracle, their_inputs, use_numpy
from tests.fakes.media_family import Items, MediaFamily, recording, several
from tests.fakes.recordings import tones
from tokenmesh.services.tokenizer_svc.media.processor import PreparedItem
from tokenmesh.services.tokenizer_svc.media.recordings import RecordingProcessor
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.messages.media import AUDIO

pytestmark = pytest.mark.timeout(180)
FAST = ("qwen2_audio",)
FAMILIES = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in FAKES]
ONE, THREE, TEXT, AGAIN = (
    several(AUDIO, 1),
    several(AUDIO, 1, 2, 3),
    several(AUDIO),
    several(AUDIO, 2, 2),
)


@dataclass(eq=False)
class AudioFamily(MediaFamily):
    processor: RecordingProcessor

    def placeholder(self, kind: str) -> str:
        return FAKES[self.name].placeholder

    def prepare(self, kind: str, seed: int) -> PreparedItem:
        return self.processor(recording(seed))

    def their_inputs(self, items: Items) -> dict[str, Any]:
        recordings = [recording(seed) for _, seed in items]
        return dict(their_inputs(self.directory, self.name, self.text(items), recordings))


_loaded: dict[str, AudioFamily] = {}


@pytest.fixture
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AudioFamily:
    name: str = request.param
    if name not in _loaded:
        _loaded.clear()
        directory = audio_checkpoint(tmp_path_factory.mktemp(name), name)
        parts, model = AudioFamily.parts(directory), audio_oracle(directory, name)
        processor = RecordingProcessor(directory)
        use_numpy(processor._mel.extractor)
        _loaded[name] = AudioFamily(name=name, model=model, processor=processor, **parts)
    return _loaded[name]


each_family = pytest.mark.parametrize("family", FAMILIES, indirect=True)


@each_family
def test_prompts_and_answers_are_those_of_transformers(family: AudioFamily) -> None:
    family.check_answers([ONE, THREE, TEXT, AGAIN])


@each_family
@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_chunks_may_end_anywhere(family: AudioFamily, chunk: int) -> None:
    family.check_chunks([THREE, TEXT, ONE], chunk)


@each_family
def test_chunks_may_end_at_each_border_of_a_recording(family: AudioFamily) -> None:
    family.check_borders(THREE)


@each_family
def test_a_recording_is_computed_once_for_equal_prompts(family: AudioFamily) -> None:
    family.check_prefix_hits(THREE, several(AUDIO, 2, 1, 3))


@each_family
def test_a_stream_goes_on_from_its_tokens_and_after_preemption(family: AudioFamily) -> None:
    family.check_resumed(THREE)
    prompts = [several(AUDIO, seed) for seed in (2, 3, 1)]
    assert family.check_preempted(prompts, family.least_blocks(prompts)) > 0


@each_family
def test_recordings_that_the_model_cannot_hear_are_refused(family: AudioFamily) -> None:
    with pytest.raises(InvalidInput, match=r"at least 0\.1 s"):
        family.processor(tones(0.05))
    with pytest.raises(InvalidInput, match=r"at most|context holds 1024"):
        family.processor(tones(170))
    shortest = family.processor(tones(0.1)).prepared
    assert shortest.runs[0] >= 1

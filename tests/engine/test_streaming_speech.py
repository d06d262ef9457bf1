"""A model that writes while it listens: features, tower and engine together, as transformers."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers
from msgspec import structs

from tests.fakes.audio_models import streaming_checkpoint
from tests.fakes.engine_driver import EngineDriver, Job, greedy
from tests.fakes.recordings import tones
from tokenmesh.services.gateway.apis.audio.prompts import SpeechTask, part_of_speech, tokenized
from tokenmesh.services.mm_encoder_svc.batcher import Features, StateLost
from tokenmesh.services.mm_encoder_svc.checkpoint import find_tower
from tokenmesh.services.mm_encoder_svc.speech_states import CausalStates, encode_part
from tokenmesh.services.mm_encoder_svc.tower import Tower, load_tower
from tokenmesh.services.tokenizer_svc.loading import load_model
from tokenmesh.services.tokenizer_svc.media.features import load_audio_features
from tokenmesh.services.tokenizer_svc.media.speech import speech_facts
from tokenmesh.services.tokenizer_svc.media.stream_features import StreamFeatures
from tokenmesh.shared.config.model import EncoderSettings, ModelSettings
from tokenmesh.shared.errors import CheckpointError
from tokenmesh.shared.ids import BlobKey
from tokenmesh.shared.messages.audio import AudioClip, SpeechFacts
from tokenmesh.shared.messages.media import MediaItem
from tokenmesh.shared.tensor_blob import TensorBlob
from tokenmesh.shared.tokens import unpack_ids

NUM_TOKENS = 32
SECONDS = {1: 1.7, 2: 2.36, 3: 2.0}
"""The length of each recording."""


@dataclass(eq=False)
class Streaming:
    """A checkpoint, all that reads it, and transformers' own model."""

    directory: Path
    features: StreamFeatures
    facts: SpeechFacts
    tower: Tower
    model: Any
    driver: EngineDriver

    @cache  # noqa: B019
    def spectrogram(self, seed: int) -> Any:
        return self.features(tones(SECONDS[seed], seed=seed))

    @cache  # noqa: B019
    def job(self, seed: int) -> Job:
        """As the gateway sends a clip."""
        values = self.spectrogram(seed)[None]
        count = values.shape[-1] // self.features.frames_of_token
        clip = AudioClip(
            start_s=0.0,
            end_s=SECONDS[seed],
            content_hash=f"clip {seed}",
            features=BlobKey("f"),
            num_tokens=count,
        )
        task = SpeechTask(facts=self.facts)
        prompt = tokenized(task.prompt(), clip, self.facts)
        blob = TensorBlob("float32", values.shape, values.tobytes())
        features = Features("audio", {"input_features": blob}, count)
        self.tower.check(features)
        (found,) = self.tower.encode([features])
        length = min(NUM_TOKENS, task.max_tokens(clip, None) or 0)
        embeddings = {clip.content_hash: found}
        ids = unpack_ids(prompt.token_ids)
        return Job(ids, greedy(length), media=prompt.media, embeddings=embeddings)

    @cache  # noqa: B019
    def expected(self, seed: int) -> list[int]:
        job = self.job(seed)
        with torch.inference_mode():
            ids = self.model.generate(
                input_ids=torch.tensor([job.prompt]),
                input_features=torch.tensor(self.spectrogram(seed))[None],
                num_delay_tokens=self.features.layout.delay,
                max_new_tokens=job.sampling.max_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        return ids[0, len(job.prompt) :].tolist()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Streaming:
    directory = streaming_checkpoint(tmp_path_factory.mktemp("streaming"))
    loaded = load_model(ModelSettings(model=str(directory)))
    features, facts = load_audio_features(directory), speech_facts(loaded, None)
    found = find_tower(str(directory), None)
    assert isinstance(features, StreamFeatures)
    assert facts is not None
    assert found is not None
    kind = transformers.VoxtralRealtimeForConditionalGeneration
    return Streaming(
        directory,
        features,
        facts,
        load_tower(found, "float32", EncoderSettings(device="cpu")),
        kind.from_pretrained(directory, dtype=torch.float32).eval(),
        EngineDriver(directory, max_num_batched_tokens=64),
    )


def test_features_are_those_of_transformers(model: Streaming) -> None:
    extractor = transformers.VoxtralRealtimeFeatureExtractor(feature_size=16)
    samples = model.features.padded(tones(1.7))
    # five tokens of silence before, a whole token at the end, three, one and ten after
    assert len(samples) == (5 + 22 + 3 + 1 + 10) * 1280
    theirs = extractor(samples, sampling_rate=16000)["input_features"][0].numpy()
    ours = model.features.spectrogram(samples)
    assert ours.shape == theirs.shape
    numpy.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_a_prompt_is_that_of_mistrals_processor(model: Streaming) -> None:
    # the start, then silence and the delay
    assert model.facts.prompt_ids == [3, *[4] * (5 + 3)]
    assert {0, 1, 2, 3, 4} == set(model.facts.hidden_ids)
    assert model.facts.timestamp_s == pytest.approx(0.08)
    # the context holds 1024 tokens
    assert model.facts.window_s == pytest.approx(60.0)


def test_transcripts_are_those_of_transformers(model: Streaming) -> None:
    jobs, expected = [model.job(n) for n in SECONDS], [model.expected(n) for n in SECONDS]
    assert model.driver.again().tokens(jobs) == expected
    assert len({tuple(each) for each in expected}) == len(jobs)


@pytest.mark.parametrize("chunk", [1, 4])
def test_chunks_may_end_anywhere(model: Streaming, chunk: int) -> None:
    driver = model.driver.again(max_num_batched_tokens=chunk)
    jobs, expected = [model.job(n) for n in SECONDS], [model.expected(n) for n in SECONDS]
    assert driver.tokens(jobs, steps_between=2) == expected


def test_a_stream_goes_on_from_its_tokens_and_after_preemption(model: Streaming) -> None:
    job, whole = model.job(2), model.expected(2)
    rest = Job(job.prompt, job.sampling, whole[:17], job.media, job.embeddings)
    (outcome,) = model.driver.again().run([rest])
    assert outcome.token_ids == whole
    jobs = [model.job(n) for n in SECONDS]
    outcomes = model.driver.again(num_blocks=6).run(jobs)
    assert [each.token_ids for each in outcomes] == [model.expected(n) for n in SECONDS]
    assert sum(each.num_preemptions for each in outcomes) > 0


def test_a_prefix_is_shared_by_the_same_recording_only(model: Streaming) -> None:
    driver = model.driver.again()
    for seed in (1, 2, 1, 3, 2):
        assert driver.tokens([model.job(seed)]) == [model.expected(seed)]


def parts_of(model: Streaming, seed: int, size: int) -> list[tuple[MediaItem, Features]]:
    """The items of a recording that is encoded in parts of so many tokens, and their features."""
    values, frames = model.spectrogram(seed)[None], model.features.frames_of_token
    found: list[tuple[MediaItem, Features]] = []
    for offset in range(0, values.shape[-1] // frames, size):
        part = numpy.ascontiguousarray(values[..., offset * frames : (offset + size) * frames])
        follows = found[-1][0].content_hash if found else ""
        clip = AudioClip(
            start_s=0.0,
            end_s=0.0,
            content_hash=f"{seed} from {offset} of {size}",
            features=BlobKey("f"),
            num_tokens=part.shape[-1] // frames,
        )
        item = part_of_speech(clip, offset, follows)
        tensors = {"input_features": TensorBlob("float32", part.shape, part.tobytes())}
        features = Features("audio", tensors, item.length, (follows, item.content_hash))
        model.tower.check(features)
        found.append((item, features))
    return found


@pytest.mark.parametrize("size", [1, 6, 13])
def test_speech_in_parts_is_written_as_the_whole(model: Streaming, size: int) -> None:
    """As the gateway sends it: each prompt is all that was written before."""
    driver, prompt = model.driver.again(), model.facts.prompt_ids
    for seed in SECONDS:
        expected, written = model.expected(seed), list[int]()
        items: list[MediaItem] = []
        embeddings: dict[str, TensorBlob] = {}
        num_cached = 0
        for item, features in parts_of(model, seed, size):
            (embeddings[item.content_hash],) = model.tower.encode([features])
            items = [*items, item]
            room = min(item.end, len(prompt) + NUM_TOKENS) - len(prompt) - len(written)
            if room > 0:
                ids = [*prompt, *written]
                job = Job(ids, greedy(room), media=items, embeddings=dict(embeddings))
                (outcome,) = driver.run([job])
                assert outcome.error is None
                written += outcome.token_ids
                num_cached = outcome.num_cached
        assert written == expected
        assert num_cached >= len(prompt) + NUM_TOKENS - size - 2 * driver.settings.block_size


def test_a_tower_goes_on_from_the_part_before(model: Streaming) -> None:
    ((item, features),) = parts_of(model, 2, 100)
    (whole,) = model.tower.encode([Features("audio", features.tensors, item.length)])
    parts = [features for _, features in parts_of(model, 2, 6)]
    found = [model.tower.encode([each])[0] for each in parts]
    joined = numpy.concatenate([numpy.frombuffer(each.data, "<f4") for each in found])
    numpy.testing.assert_allclose(joined, numpy.frombuffer(whole.data, "<f4"), atol=2e-5)
    with pytest.raises(StateLost):  # it is at the end by now
        model.tower.encode([parts[2]])
    # two speeches at a time, in one batch
    others = [features for _, features in parts_of(model, 1, 6)]
    for pair in zip(parts, others, strict=False):
        model.tower.encode(list(pair))
    (again,) = model.tower.encode([parts[len(others)]])
    assert again.data == found[len(others)].data


def test_states_of_speech_stay_within_their_bytes(model: Streaming) -> None:
    states = CausalStates(max_bytes=100_000)
    items = torch.zeros(1, 16, 48)
    for number in range(20):
        _, state = encode_part(model.tower._causal, items, None)
        states.replace("", str(number), state)
    assert 1 <= len(states) == 100_000 // state.num_bytes < 20
    with pytest.raises(StateLost):
        states.after("0")
    before = states.after("19")
    encode_part(model.tower._causal, items, before)
    assert before.num_bytes > states.after("19").num_bytes
    assert len(CausalStates(0)) == 0


def test_a_prompt_without_its_recording_is_refused(model: Streaming) -> None:
    facts, job = model.driver.model.media, model.job(1)
    (item,) = job.media
    assert facts.problem_of([item], item.length) is None
    assert "have 41 tokens, the recording 40" in str(
        facts.problem_of([structs.replace(item, length=40)], 41)
    )
    after = structs.replace(item, offset=item.end)
    assert facts.problem_of([item, after], 2 * item.length) is None
    problem = facts.problem_of([item, after], 2 * item.length + 1)
    assert f"the recording {2 * item.length}" in str(problem)
    for bad in ([], [item, item], [after], [structs.replace(item, combine="replace")]):
        assert "a prompt has one, added to all tokens" in str(facts.problem_of(bad, 20))


def test_a_delay_that_the_weights_were_not_made_for_is_refused(
    model: Streaming, tmp_path: Path
) -> None:
    for name in ("config.json", "preprocessor_config.json"):
        (tmp_path / name).write_bytes((model.directory / name).read_bytes())
    (tmp_path / "tekken.json").write_text('{"audio": {"transcription_delay_ms": 480}}')
    with pytest.raises(CheckpointError, match="transcription_delay_ms is 480"):
        load_audio_features(tmp_path)

"""Whisper's decoder: cross attention over pages that are written when a row begins."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, WhisperForConditionalGeneration
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from tests.fakes.engine_driver import EngineDriver, Job, greedy
from tests.fakes.tiny import prompt_of
from tests.fakes.whisper import END, FIRST_TIME, HIDDEN, STATES, WhisperOracle, whisper
from tokenmesh.engine.core.outputs import StepOutput
from tokenmesh.engine.plan import NewRow
from tokenmesh.engine.sampling.sampler import Sampler
from tokenmesh.engine.sampling.speech import SpeechState
from tokenmesh.shared.ids import BlobKey
from tokenmesh.shared.messages.media import MediaItem
from tokenmesh.shared.messages.sampling import SamplingParams, SpeechRule
from tokenmesh.shared.tensor_blob import TensorBlob

NUM_TOKENS = 32
# transformers computes the expected transcripts token by token
pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def oracle(directory: Path) -> Any:
    model = WhisperForConditionalGeneration.from_pretrained(directory, dtype=torch.float32)
    return model.eval()


@pytest.fixture(scope="module")
def driver(directory: Path) -> EngineDriver:
    return EngineDriver(directory, max_num_seqs=4, block_size=16)


def encoded(oracle: Any, clip: int) -> torch.Tensor:
    """States of a clip of noise that is followed by silence from some moment on."""
    generator = torch.Generator().manual_seed(clip)
    features = torch.randn(1, 16, 2 * STATES, generator=generator)
    features[:, :, 100 * (1 + clip % 4) :] = -1.5
    with torch.no_grad():
        return oracle.model.encoder(features).last_hidden_state[0]  # type: ignore[no-any-return]


def job_of(oracle: Any, clip: int, length: int = 5) -> Job:
    states = encoded(oracle, clip)
    key = f"clip{clip}"
    blob = TensorBlob("float32", tuple(states.shape), states.numpy().tobytes())
    item = MediaItem(kind="audio", content_hash=key, offset=0, length=1, pixels=BlobKey("features"))
    prompt = prompt_of(length, seed=clip)
    return Job(prompt, greedy(NUM_TOKENS), media=[item], embeddings={key: blob})


def expected(oracle: Any, clip: int, length: int = 5) -> list[int]:
    """transformers' greedy tokens."""
    states = (encoded(oracle, clip)[None],)
    ids = prompt_of(length, seed=clip)
    cache, given = None, ids
    for _ in range(NUM_TOKENS):
        with torch.no_grad():
            out = oracle(
                encoder_outputs=states,
                decoder_input_ids=torch.tensor([given]),
                past_key_values=cache,
                use_cache=True,
            )
        cache, given = out.past_key_values, [int(out.logits[0, -1].argmax())]
        ids = ids + given
    return ids[length:]


def test_clips_in_a_batch_match_transformers(driver: EngineDriver, oracle: Any) -> None:
    lengths = [5, 1, 23, 40, 8, 17]
    jobs = [job_of(oracle, clip, length) for clip, length in enumerate(lengths)]
    outcome = driver.again().tokens(jobs, steps_between=3)
    assert outcome == [expected(oracle, clip, length) for clip, length in enumerate(lengths)]
    assert outcome[0] != expected(oracle, 9)


@pytest.mark.parametrize("chunk", [1, pytest.param(7, marks=pytest.mark.slow), 16])
def test_chunks_of_a_prompt_match_transformers(
    driver: EngineDriver, oracle: Any, chunk: int
) -> None:
    jobs = [job_of(oracle, clip, 40) for clip in (1, 2)]
    outcome = driver.again(max_num_batched_tokens=chunk).tokens(jobs)
    assert outcome == [expected(oracle, clip, 40) for clip in (1, 2)]


def test_log_probabilities_match_transformers(driver: EngineDriver, oracle: Any) -> None:
    job = job_of(oracle, 3, 12)
    sampling = SamplingParams(seed=0, max_tokens=1, temperature=0.0, logprobs=400)
    (outcome,) = driver.again().run([replace(job, sampling=sampling)])
    with torch.no_grad():
        states = (encoded(oracle, 3)[None],)
        logits = oracle(encoder_outputs=states, decoder_input_ids=torch.tensor([job.prompt])).logits
    (entry,) = outcome.logprobs
    wanted = logits[0, -1].log_softmax(-1)[torch.tensor(entry.top_ids)]
    torch.testing.assert_close(torch.tensor(entry.top_logprobs), wanted, atol=2e-4, rtol=0)


def test_a_preempted_clip_continues_with_the_same_tokens(driver: EngineDriver, oracle: Any) -> None:
    jobs = [job_of(oracle, clip, 30) for clip in range(4)]
    outcomes = driver.again(num_blocks=12).run(jobs)
    assert sum(outcome.num_preemptions for outcome in outcomes) > 0
    assert [outcome.token_ids for outcome in outcomes] == [
        expected(oracle, clip, 30) for clip in range(4)
    ]


def test_a_stream_continues_after_the_tokens_of_another_worker(
    driver: EngineDriver, oracle: Any
) -> None:
    wanted = expected(oracle, 1)
    job = replace(job_of(oracle, 1), output=wanted[:11])
    assert driver.again().tokens([job]) == [wanted]


def test_prompts_share_blocks_only_if_their_clips_are_equal(
    driver: EngineDriver, oracle: Any
) -> None:
    engine = driver.again()
    first = job_of(oracle, 1, 40)
    other = job_of(oracle, 2)
    same_text = replace(other, prompt=first.prompt)
    assert engine.run([first])[0].num_cached == 0
    again, different = engine.run([first, same_text])
    assert (again.num_cached, different.num_cached) == (32, 0)
    assert again.token_ids == expected(oracle, 1, 40)
    assert different.token_ids != again.token_ids


def test_missing_or_misshapen_states_fail_their_request_alone(
    driver: EngineDriver, oracle: Any
) -> None:
    good = job_of(oracle, 1)
    short = TensorBlob("float32", (2, HIDDEN), bytes(2 * HIDDEN * 4))
    item = good.media[0]
    late = MediaItem(
        kind="audio", content_hash="clip1", offset=2, length=1, pixels=BlobKey("features")
    )
    jobs = [
        good,
        replace(good, media=[], embeddings={}),
        replace(good, media=[item, item]),
        replace(good, embeddings={}),
        replace(good, embeddings={"clip1": short}),
        replace(good, media=[late]),
    ]
    outcomes = driver.again().run(jobs)
    assert outcomes[0].token_ids == expected(oracle, 1)
    words = ("0 recordings", "2 recordings", "missing", "shape", "at token 2")
    for outcome, word in zip(outcomes[1:], words, strict=True):
        assert word in (outcome.error or "")


def test_the_pool_leaves_room_for_the_cross_pages_of_all_rows(driver: EngineDriver) -> None:
    bytes_of_a_row = 3 * 2 * STATES * HIDDEN * 4
    assert driver.model.kv_bytes.row == bytes_of_a_row


def test_rules_of_timestamps_are_those_of_transformers(directory: Path) -> None:
    config = GenerationConfig.from_pretrained(directory)
    end, first = config.eos_token_id, config.no_timestamps_token_id + 1
    begin = config.begin_suppress_tokens
    rule = SpeechRule(
        suppress_ids=config.suppress_tokens,
        begin_suppress_ids=begin,
        end_id=end,
        no_timestamps_id=first - 1,
        first_timestamp_id=first,
        max_initial_timestamp=config.max_initial_timestamp_index,
    )
    prompt = [301, 302, 307]
    theirs = [
        SuppressTokensAtBeginLogitsProcessor(begin, begin_index=len(prompt)),
        SuppressTokensLogitsProcessor(config.suppress_tokens),
        WhisperTimeStampLogitsProcessor(config, begin_index=len(prompt)),
    ]
    generator = torch.Generator().manual_seed(5)
    vocab_size = first + STATES + 1
    for case in range(60):
        output: list[int] = []
        states = SpeechState()
        sampling = SamplingParams(seed=0, max_tokens=9, speech=rule)
        new = NewRow(case, [*prompt], len(prompt), sampling, [], False)
        states.add(new)
        for _ in range(8):
            # now timestamps, now text is likely
            logits = torch.randn(vocab_size, generator=generator) * 2
            logits[first:] += float(torch.randn((), generator=generator)) * 3
            wanted = logits[None].clone()
            for process in theirs:
                wanted = process(torch.tensor([prompt + output]), wanted)
            states.apply(logits[None], [case])
            assert torch.equal(logits, wanted[0])
            output.append(int(logits.softmax(-1).multinomial(1, generator=generator)))
            states.append(case, output[-1])
        states.remove(case)
    assert not len(states)


@pytest.mark.parametrize("timed", [False, True], ids=["text", "timestamps"])
def test_transcripts_match_those_of_transformers(
    directory: Path, driver: EngineDriver, oracle: Any, timed: bool
) -> None:
    theirs = WhisperOracle(directory)
    config = theirs.config
    rule = SpeechRule(
        suppress_ids=config.suppress_tokens,
        begin_suppress_ids=config.begin_suppress_tokens,
        end_id=END,
        no_timestamps_id=config.no_timestamps_token_id,
        first_timestamp_id=FIRST_TIME if timed else -1,
        max_initial_timestamp=config.max_initial_timestamp_index,
    )
    prompt = theirs.prompt("de", "transcribe", timed=timed)
    sampling = SamplingParams(seed=0, max_tokens=92, temperature=0.0, speech=rule)
    clips = range(5)
    jobs = [replace(job_of(oracle, clip), prompt=prompt, sampling=sampling) for clip in clips]
    ours = driver.again(num_blocks=20).run(jobs)
    assert sum(outcome.num_preemptions for outcome in ours) > 0
    for clip, outcome in zip(clips, ours, strict=True):
        wanted = theirs.tokens(encoded(oracle, clip), prompt, timed=timed)
        assert [token for token in outcome.token_ids if token != END] == wanted[:92]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("shows_processed", [False, True])
def test_log_probabilities_of_a_transcript_are_of_what_its_rules_allow(
    temperature: float, shows_processed: bool
) -> None:
    """OpenAI's Whisper and CTranslate2 take them after the rules, before temperature."""
    first, end = 20, 19
    rule = SpeechRule(
        suppress_ids=[1, 2], end_id=end, no_timestamps_id=first - 1, first_timestamp_id=first
    )
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(3, 40, generator=generator)
    logits[:, 1] = 9.0  # what the model wants to say is suppressed
    sampler = Sampler(40, frozenset({end}), shows_processed=shows_processed)
    for row, speech in enumerate((rule, None, rule)):
        sampling = SamplingParams(
            seed=row, max_tokens=9, temperature=temperature, logprobs=0, speech=speech
        )
        sampler.add(NewRow(row, [5, 6], 2, sampling, [], False))
    drawn = sampler.draw([0, 1, 2], logits.clone()).draw_by_row
    for row in (0, 2):
        token, entry = drawn[row].token_id, drawn[row].logprobs
        assert token >= first, "a transcript begins with a timestamp"
        assert entry is not None
        wanted = logits[row, first:].log_softmax(-1)
        assert entry.logprob == pytest.approx(float(wanted[token - first]), abs=1e-5)
        assert entry.rank == 1 + int((wanted > wanted[token - first]).sum())
    plain = drawn[1].logprobs
    assert plain is not None
    scale = temperature if shows_processed and temperature else 1.0
    wanted = (logits[1] / scale).log_softmax(-1)
    assert plain.logprob == pytest.approx(float(wanted[drawn[1].token_id]), abs=1e-5)


@pytest.mark.parametrize("chunk", [7, 64])
def test_transcripts_are_aligned_as_by_transformers(
    driver: EngineDriver, directory: Path, chunk: int
) -> None:
    oracle = WhisperOracle(directory)
    jobs, expected = [], []
    for clip in (1, 2):
        job = job_of(oracle.model, clip, 40)
        rule = SpeechRule(align_from=4, align_states=150)
        sampling = SamplingParams(seed=0, max_tokens=1, temperature=0.0, speech=rule)
        jobs.append(replace(job, sampling=sampling))
        ids = list(job.prompt)
        ends_s = oracle.ends_s(encoded(oracle.model, clip), ids[:4], ids[4:], 3.0)
        expected.append([round(each / 0.02) for each in ends_s])
    found: dict[int, list[int]] = {}
    engine = driver.again(max_num_batched_tokens=chunk)

    def note(output: StepOutput) -> None:
        deltas = (delta for each in output.deltas.values() for delta in each)
        found.update({each.stream: each.alignment for each in deltas if each.alignment})

    engine.on_output = note  # type: ignore[method-assign]
    engine.run(jobs)
    assert [found[stream] for stream in sorted(found)] == expected


def test_a_head_and_the_embedding_that_it_shares_are_kept_once(driver: EngineDriver) -> None:
    """The head's panels are what rows of the embedding are read from."""
    model: Any = driver.model.resident._model
    assert model.tree.embedding.weight.is_meta
    assert model.device.type == "cpu"


LEAN = """
import sys
from pathlib import Path
from tests.fakes.engine_driver import load
load(Path(sys.argv[1]), max_num_seqs=4, block_size=16)
unused = {"torch._dynamo", "torch._inductor", "triton", "torch.distributed.tensor"}
print(*(unused & {*sys.modules}))
"""


def test_a_tree_is_loaded_without_torchs_compiler(directory: Path) -> None:
    """It is 90 MB and two seconds of each process, and nothing here uses it."""
    command = [sys.executable, "-c", LEAN, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout.split() == []

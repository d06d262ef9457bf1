"""SimRunner: tokens that depend on prompt, seed and position alone, and a clock that tests set."""

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.drafts import DiceProposer
from tests.simulation.virtual_time import virtual_time
from tokenmesh.engine.core.engine import Engine
from tokenmesh.engine.core.proposing import Proposer
from tokenmesh.engine.core.sim import (
    SimRunner,
    SimVocabulary,
    prompt_key,
    sim_token,
)
from tokenmesh.engine.request.request import Request
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.messages.tokens import Delta
from tokenmesh.shared.tokens import unpack_ids

MakeRequest = Callable[..., Request]
VOCABULARY = SimVocabulary(50, (0, 7, 49))


def outputs(
    *requests: Request,
    settings: WorkerSettings | None = None,
    proposer: Proposer | None = None,
) -> dict[int, list[Delta]]:
    """Run to the end; the deltas of each stream."""
    settings = settings or WorkerSettings(sim_time_scale=0.0, sim_num_blocks=64)
    runner = SimRunner(VOCABULARY, settings, lambda _: None)
    engine = Engine(runner, settings, proposer=proposer)
    for request in requests:
        engine.add(request)
    deltas: dict[int, list[Delta]] = {request.key.stream: [] for request in requests}
    while engine.has_work:
        engine.step()
        for delta in engine.take_output().deltas.get(requests[0].key.gateway, []):
            deltas[delta.stream].append(delta)
    return deltas


def tokens_of(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in unpack_ids(delta.token_ids)]


def test_a_stream_has_the_documented_tokens_alone_and_in_company(
    make_request: MakeRequest,
) -> None:
    prompt = list(range(20, 45))
    expected = [
        sim_token(prompt_key(prompt), SamplingParams(seed=1, max_tokens=12), position, VOCABULARY)
        for position in range(12)
    ]
    alone = outputs(make_request(1, prompt, max_tokens=12))
    others = [make_request(stream, prompt[:stream], max_tokens=20) for stream in range(2, 9)]
    tight = WorkerSettings(
        sim_time_scale=0.0, sim_num_blocks=10, block_size=4, max_num_batched_tokens=9
    )
    together = outputs(make_request(1, prompt, max_tokens=12), *others, settings=tight)
    assert tokens_of(alone[1]) == tokens_of(together[1]) == expected


@pytest.mark.parametrize("share_wrong", [0.0, 0.5, 1.0])
def test_drafts_change_no_token(make_request: MakeRequest, share_wrong: float) -> None:
    def all_of() -> list[Request]:
        sampling = {"logprobs": 2, "ignore_eos": True}
        return [
            make_request(stream, [stream] * 9, max_tokens=20, sampling=sampling)
            for stream in range(1, 7)
        ]

    expected = outputs(*all_of())
    tokens = {stream: tokens_of(deltas) for stream, deltas in expected.items()}
    proposer = DiceProposer(
        Random(3), lambda request: tokens[request.key.stream], 50, share_wrong=share_wrong
    )
    found = outputs(*all_of(), proposer=proposer)
    assert {stream: tokens_of(deltas) for stream, deltas in found.items()} == tokens
    for stream, deltas in found.items():
        logprobs = [entry for delta in deltas for entry in delta.logprobs or []]
        assert logprobs == [entry for delta in expected[stream] for entry in delta.logprobs or []]
    # right drafts come with the token before them
    num_deltas = sum(map(len, found.values()))
    assert num_deltas < (60 if share_wrong == 0.0 else 120)


@given(done=st.integers(0, 11))
def test_a_stream_that_moves_goes_on_with_the_same_tokens(done: int) -> None:
    key, sampling = prompt_key([5, 6]), SamplingParams(seed=3, max_tokens=12)
    whole = [sim_token(key, sampling, position, VOCABULARY) for position in range(12)]
    assert [sim_token(key, sampling, at, VOCABULARY) for at in range(done, 12)] == whole[done:]


@given(number=st.integers(0, 2**64 - 1), size=st.integers(1, 60))
def test_an_end_is_never_drawn_unless_it_is_all_there_is(number: int, size: int) -> None:
    eos = tuple(token for token in VOCABULARY.eos_ids if token < size)
    token = SimVocabulary(size, eos).pick(number)
    assert 0 <= token < size
    assert token not in eos or len(eos) == size


def test_every_other_id_is_drawn() -> None:
    drawn = {VOCABULARY.pick(number) for number in range(VOCABULARY.size)}
    assert drawn == set(range(VOCABULARY.size)) - set(VOCABULARY.eos_ids)


def test_an_end_can_be_asked_for(make_request: MakeRequest) -> None:
    request = make_request(1, [5], sampling={"allowed_token_ids": [7]}, eos_ids=frozenset({7}))
    (delta,) = outputs(request)[1]
    assert (unpack_ids(delta.token_ids), delta.finish) == ([7], "stop")


def test_logprobs_have_the_shape_that_was_asked_for(make_request: MakeRequest) -> None:
    sampling = {"logprobs": 3, "prompt_logprobs": 0}
    settings = WorkerSettings(sim_time_scale=0.0, sim_num_blocks=64, max_num_batched_tokens=4)
    deltas = outputs(make_request(1, list(range(9)), sampling=sampling), settings=settings)[1]
    for delta in deltas:
        assert delta.logprobs is not None
        assert [entry.token_id for entry in delta.logprobs] == unpack_ids(delta.token_ids)
        assert all(len(entry.top_ids) == len(entry.top_logprobs) == 3 for entry in delta.logprobs)
    assert deltas[0].prompt_logprobs is not None
    assert deltas[0].prompt_logprobs[0] is None
    ids = [entry.token_id for entry in deltas[0].prompt_logprobs[1:] if entry]
    assert ids == list(range(1, 9))
    assert all(delta.prompt_logprobs is None for delta in deltas[1:])


@pytest.mark.parametrize("is_async", [False, True])
def test_a_step_takes_the_time_of_its_parts_and_begins_after_the_one_before(
    make_request: MakeRequest, is_async: bool
) -> None:
    settings = WorkerSettings(
        sim_step_s=1.0,
        sim_seq_s=0.25,
        sim_prefill_tokens_per_s=10.0,
        sim_time_scale=2.0,
        async_scheduling=is_async,
    )
    with virtual_time() as now:
        engine = Engine(SimRunner(VOCABULARY, settings, now.sleep), settings)
        engine.add(make_request(1, list(range(30)), max_tokens=3))
        shown = []
        while engine.has_work:
            engine.step()
            if engine.take_output().deltas:
                shown.append(now.elapsed_s)
    prefill_s, decode_s = 2 * (1.0 + 0.25 + 3.0), 2 * (1.0 + 0.25)
    expected = [prefill_s, prefill_s + decode_s, prefill_s + 2 * decode_s]
    assert shown == pytest.approx(expected)


def test_stages_change_no_token_and_compute_prompts_at_a_time(make_request: MakeRequest) -> None:
    def run(stages: int) -> tuple[list[list[int]], float]:
        settings = WorkerSettings(
            pipeline_parallel_size=stages,
            max_num_batched_tokens=16,
            enable_prefix_caching=False,
            sim_step_s=0.0,
            sim_seq_s=0.0,
            sim_prefill_tokens_per_s=1.0,
        )
        with virtual_time() as clock:
            runner = SimRunner(VOCABULARY, settings, clock.sleep)
            engine = Engine(runner, settings)
            requests = [make_request(each, [each] * 16, max_tokens=1) for each in range(8)]
            for request in requests:
                engine.add(request)
            while engine.has_work:
                engine.step()
            return [request.token_ids[16:] for request in requests], clock.elapsed_s

    (one, one_s), (two, two_s) = run(1), run(2)
    assert one == two
    # eight prompts of 16 s, or nine halves of them
    assert one_s == pytest.approx(128.0, rel=0.01)
    assert two_s == pytest.approx(72.0, rel=0.01)

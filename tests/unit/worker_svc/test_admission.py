"""Admission: the worker names what is wrong with a message, and lets nothing else through."""

from contextlib import AbstractContextManager, nullcontext, suppress
from math import inf, nextafter
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tokenmesh.engine.core.sim import SimRunner, SimVocabulary
from tokenmesh.engine.media_facts import MediaFacts, ends_outside
from tokenmesh.services.gateway.apis.openai.sampling_fields import SamplingFields
from tokenmesh.services.worker_svc.admission import admit
from tokenmesh.services.worker_svc.loaded import SimModel
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import InvalidInput, PromptTooLong
from tokenmesh.shared.ids import BlobKey, GatewayId, ModelName, RequestId
from tokenmesh.shared.messages.generate import Generate
from tokenmesh.shared.messages.media import IMAGE, MediaItem
from tokenmesh.shared.messages.sampling import (
    RANGES,
    RepetitionRule,
    SamplingParams,
    ThinkingBudget,
)
from tokenmesh.shared.tokens import pack_ids

SETTINGS = WorkerSettings(num_gpu_blocks_override=9, block_size=8)
VOCAB = 100
LOADED = SimModel(
    SimRunner(SimVocabulary(VOCAB), SETTINGS, lambda _: None), 128, VOCAB, frozenset({2})
)
MESSAGE = Generate(
    request_id=RequestId("r"),
    model=ModelName("m"),
    gateway=GatewayId("g"),
    stream=1,
    epoch=1,
    prompt_ids=pack_ids(range(20)),
    sampling=SamplingParams(seed=1, max_tokens=10),
)


def changed(**fields: Any) -> Generate:
    return msgspec.structs.replace(MESSAGE, **fields)


def with_sampling(**fields: Any) -> Generate:
    return changed(sampling=msgspec.structs.replace(MESSAGE.sampling, **fields))


def image(offset: int, length: int) -> MediaItem:
    return MediaItem(
        kind="image", content_hash="c", offset=offset, length=length, pixels=BlobKey("p")
    )


def test_a_good_message_becomes_a_request() -> None:
    request = admit(changed(output_ids=pack_ids([7, 8]), cache_salt="s"), LOADED, 8)
    assert request.token_ids == [*range(20), 7, 8]
    assert (request.num_prompt, request.output.num_resumed, request.spec.max_len) == (20, 2, 30)
    assert (request.spec.cache_salt, request.spec.stop_ids) == ("s", frozenset({2}))


def test_ids_beyond_the_vocabulary_are_placeholders_of_media_or_refused() -> None:
    seeing = SimModel(LOADED.runner, 128, VOCAB, frozenset(), media=MediaFacts(frozenset({IMAGE})))
    ids = [1, *[VOCAB + 7] * 3, 2, *[VOCAB] * 2, 3]
    media = [image(5, 2), image(1, 3)]
    message = changed(prompt_ids=pack_ids(ids), media=media)
    assert admit(message, seeing, 8).token_ids == ids
    for fields in ({"media": media[:1]}, {"media": media[1:]}, {"output_ids": pack_ids([VOCAB])}):
        with pytest.raises(InvalidInput, match="the model has 100 ids"):
            admit(msgspec.structs.replace(message, **fields), seeing, 8)


def test_media_are_put_in_order() -> None:
    with_images = msgspec.structs.replace(MESSAGE, media=[image(9, 3), image(0, 9)])
    seeing = SimModel(LOADED.runner, 128, VOCAB, frozenset(), media=MediaFacts(frozenset({IMAGE})))
    assert [item.offset for item in admit(with_images, seeing, 8).spec.media] == [0, 9]
    for broken in ([image(-1, 2)], [image(0, 0)], [image(0, 21)], [image(0, 5), image(4, 2)]):
        with pytest.raises(InvalidInput, match="overlaps another one or lies outside"):
            admit(changed(media=broken), seeing, 8)
    with pytest.raises(InvalidInput, match="takes no images"):
        admit(with_images, LOADED, 8)
    embeds = [msgspec.structs.replace(image(0, 20), kind="embeds")]
    assert len(admit(changed(media=embeds), LOADED, 8).spec.media) == 1


def test_items_with_holes_take_embeddings_around_them() -> None:
    item = msgspec.structs.replace(image(3, 10), holes=((0, 1), (4, 6), (9, 10)))
    assert item.runs() == [(4, 7), (9, 12)]
    assert item.num_embeddings == 6
    assert image(3, 10).runs() == [(3, 13)]
    seeing = SimModel(
        LOADED.runner,
        128,
        VOCAB,
        frozenset(),
        media=MediaFacts(frozenset({IMAGE}), sees_ahead=True),
    )
    assert admit(changed(media=[item]), seeing, 8).spec.whole_runs == ((4, 7), (9, 12))
    ids = [VOCAB if position in (4, 5, 6) else 1 for position in range(20)]
    assert admit(changed(prompt_ids=pack_ids(ids), media=[item]), seeing, 8).token_ids == ids
    hole = [VOCAB if position == 7 else 1 for position in range(20)]
    with pytest.raises(InvalidInput, match="the model has 100 ids"):
        admit(changed(prompt_ids=pack_ids(hole), media=[item]), seeing, 8)
    added = msgspec.structs.replace(item, combine="add")
    with pytest.raises(InvalidInput, match="the model has 100 ids"):
        admit(changed(prompt_ids=pack_ids(ids), media=[added]), seeing, 8)


@pytest.mark.parametrize("holes", [((2, 1),), ((-1, 2),), ((3, 11),), ((0, 4), (3, 5))])
def test_holes_lie_in_their_item_in_order(holes: tuple[tuple[int, int], ...]) -> None:
    seeing = SimModel(LOADED.runner, 128, VOCAB, frozenset(), media=MediaFacts(frozenset({IMAGE})))
    item = msgspec.structs.replace(image(3, 10), holes=holes)
    with pytest.raises(InvalidInput, match="holes out of order"):
        admit(changed(media=[item]), seeing, 8)


def test_kinds_of_media_that_the_model_lacks_are_refused_by_name() -> None:
    seeing = SimModel(LOADED.runner, 128, VOCAB, frozenset(), media=MediaFacts(frozenset({IMAGE})))
    for kind, named in {"video": "videos", "audio": "audio", "smell": "smell"}.items():
        item = msgspec.structs.replace(image(3, 10), kind=kind)
        with pytest.raises(InvalidInput, match=f"takes no {named}$"):
            admit(changed(media=[item]), seeing, 8)


@pytest.mark.parametrize(
    ("start", "num_tokens", "expected"),
    [(0, 4, 4), (0, 5, 4), (0, 8, 8), (0, 3, 3), (4, 1, 4), (5, 1, 3), (8, 5, 4), (12, 1, 8)],
)
def test_no_step_ends_within_a_run_that_is_seen_whole(
    start: int, num_tokens: int, expected: int
) -> None:
    assert ends_outside(((4, 8), (12, 20)), start, num_tokens) == expected


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("logprob_token_ids", [1]),
        ("repetition", RepetitionRule(max_size=0)),
        ("repetition", RepetitionRule(max_size=2, min_size=3)),
        ("repetition", RepetitionRule(max_size=2, min_size=-1)),
        ("repetition", RepetitionRule(max_size=2**40)),
        ("repetition", RepetitionRule(max_size=2, min_count=1)),
        ("thinking", ThinkingBudget(num_tokens=-1, end_ids=[1])),
        ("thinking", ThinkingBudget(num_tokens=2**40, end_ids=[1])),
        ("thinking", ThinkingBudget(num_tokens=1, num_spent=-1, end_ids=[1])),
        ("thinking", ThinkingBudget(num_tokens=1, num_spent=2**40, end_ids=[1])),
        ("thinking", ThinkingBudget(num_tokens=1, end_ids=[])),
        ("thinking", ThinkingBudget(num_tokens=1, end_ids=[1], other_ends=[[]])),
        ("thinking", ThinkingBudget(num_tokens=1, end_ids=[1], other_ends=[[-1]])),
        ("thinking", ThinkingBudget(num_tokens=1, end_ids=[1], other_ends=[[1]] * 5)),
        ("thinking", ThinkingBudget(num_tokens=1, end_ids=[VOCAB])),
        ("thinking", ThinkingBudget(num_tokens=1, start_ids=[-1], end_ids=[1])),
        ("thinking", ThinkingBudget(num_tokens=1, end_ids=[1] * 33)),
        ("max_tokens", 0),
        ("max_tokens", -(2**62)),
        ("min_tokens", -1),
        ("min_tokens", 11),
        ("temperature", -0.1),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", 2.0),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", 1e9),
        ("repetition_penalty", 0.0),
        ("logprobs", -1),
        ("logprobs", VOCAB + 1),
        ("prompt_logprobs", -5),
        ("logit_bias", {-1: 0.0}),
        ("logit_bias", {VOCAB: 0.0}),
        ("logit_bias", {1: float("nan")}),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [VOCAB]),
        ("bad_words_ids", [[1], []]),
        ("bad_words_ids", [[VOCAB]]),
    ],
)
def test_sampling_out_of_range_names_the_field(param: str, value: object) -> None:
    with pytest.raises(InvalidInput) as wrong:
        admit(with_sampling(**{param: value}), LOADED, 8)
    assert wrong.value.param == param


def test_a_request_that_can_never_fit_the_kv_cache_says_how_much_does() -> None:
    assert admit(with_sampling(max_tokens=45), LOADED, 8).spec.max_len == 65
    with pytest.raises(PromptTooLong, match="KV cache holds 65"):
        admit(with_sampling(max_tokens=46), LOADED, 8)
    with pytest.raises(PromptTooLong, match="context holds 128"):
        admit(with_sampling(max_tokens=109), LOADED, 8)


def test_numbers_without_effect_do_not_reach_the_sampler() -> None:
    message = with_sampling(top_k=2**63, stop_token_ids=[5, -1, VOCAB, 2**40])
    sampling = admit(message, LOADED, 8).spec.sampling
    assert (sampling.top_k, sampling.stop_token_ids) == (0, [5])


@pytest.mark.parametrize("name", RANGES)
def test_a_worker_takes_what_the_api_takes_and_no_more(name: str) -> None:
    low, high, _ = allowed = RANGES[name]
    for edge in (low, high, (low + high) / 2):
        for value in (nextafter(edge, -inf), edge, nextafter(edge, inf)):
            is_held = allowed.holds(value)
            refused: AbstractContextManager[object] = (
                nullcontext() if is_held else pytest.raises(ValidationError)
            )
            with refused:
                SamplingFields.model_validate({name: value})
            refused = nullcontext() if is_held else pytest.raises(InvalidInput)
            with refused:
                admit(with_sampling(**{name: value}), LOADED, 8)


def test_the_least_of_an_open_range_reaches_the_sampler_as_what_it_can_divide_by() -> None:
    message = with_sampling(top_p=1e-300, repetition_penalty=1e-300)
    sampling = admit(message, LOADED, 8).spec.sampling
    assert sampling.top_p == sampling.repetition_penalty == 1e-9


@given(seed=st.integers(-(2**63), 2**64 - 1))
def test_every_seed_is_mapped_into_range(seed: int) -> None:
    mapped = admit(with_sampling(seed=seed), LOADED, 8).spec.sampling.seed
    assert 0 <= mapped < 2**63
    assert mapped == seed or not 0 <= seed < 2**63


@given(
    message=st.builds(
        changed,
        prompt_ids=st.binary(max_size=40),
        output_ids=st.binary(max_size=12),
        stream=st.integers(-(2**63), 2**64 - 1),
        attempt=st.integers(-(2**63), 2**64 - 1),
        priority=st.integers(-(2**63), 2**64 - 1),
        sampling=st.builds(
            SamplingParams,
            seed=st.integers(-(2**63), 2**64 - 1),
            max_tokens=st.integers(-(2**63), 2**64 - 1),
            min_tokens=st.integers(-(2**63), 2**64 - 1),
            top_k=st.integers(-(2**63), 2**64 - 1),
            temperature=st.floats(),
            top_p=st.floats(),
            logit_bias=st.dictionaries(st.integers(-(2**63), 2**64 - 1), st.floats(), max_size=2),
        ),
    )
)
def test_whatever_decodes_is_admitted_or_named(message: Generate) -> None:
    with suppress(InvalidInput):
        request = admit(message, LOADED, 8)
        assert request.spec.max_len <= 65
        assert 0 <= request.spec.sampling.top_k < VOCAB


def test_a_list_of_named_tokens_is_bounded() -> None:
    for ids in ([VOCAB], [1] * 2000):
        with pytest.raises(InvalidInput, match="logprob_token_ids"):
            admit(with_sampling(logprobs=0, logprob_token_ids=ids), LOADED, 8)
    named = with_sampling(logprobs=0, logprob_token_ids=[5, 1])
    assert admit(named, LOADED, 8).spec.sampling.logprob_token_ids == [5, 1]

"""Request: when a stream ends, and what is left to do before its next token."""

from collections.abc import Callable
from typing import Any

import pytest

from tokenmesh.engine.request.request import Request
from tokenmesh.engine.request.spec import Ending
from tokenmesh.shared.messages.sampling import RepetitionRule

MakeRequest = Callable[..., Request]
EOS = frozenset({2, 3})


@pytest.mark.parametrize(
    ("output", "sampling", "ending"),
    [
        ((), {}, None),
        ((9,), {}, None),
        ((2,), {}, Ending("stop")),
        ((9, 3), {}, Ending("stop")),
        ((2,), {"ignore_eos": True}, None),
        ((7,), {"stop_token_ids": [7]}, Ending("stop", stop_token=7)),
        ((2,), {"stop_token_ids": [2]}, Ending("stop")),
        ((2,), {"stop_token_ids": [2], "ignore_eos": True}, Ending("stop", stop_token=2)),
        ((2,), {"min_tokens": 2}, None),
        ((9, 2), {"min_tokens": 2}, Ending("stop")),
        ((7,), {"min_tokens": 2, "stop_token_ids": [7]}, None),
        ((9, 9, 9, 9), {}, Ending("length")),
        ((9, 9, 9, 2), {}, Ending("stop")),
        ((9, 9), {"repetition": RepetitionRule(max_size=1)}, Ending("repetition")),
        ((2, 9), {"repetition": RepetitionRule(max_size=1)}, None),
        ((9, 9), {"repetition": RepetitionRule(max_size=2, min_size=2)}, None),
        ((9, 9), {"repetition": RepetitionRule(max_size=1), "min_tokens": 3}, None),
        ((9, 9, 9, 9), {"repetition": RepetitionRule(max_size=1)}, Ending("length")),
    ],
)
def test_a_stream_ends_by_the_rules_of_the_api(
    make_request: MakeRequest,
    output: tuple[int, ...],
    sampling: dict[str, Any],
    ending: Ending | None,
) -> None:
    assert make_request(1, [2], output, sampling=sampling, eos_ids=EOS).ending() == ending


def test_an_end_token_in_the_prompt_ends_nothing(make_request: MakeRequest) -> None:
    assert make_request(1, [5, 2], eos_ids=EOS).ending() is None


def test_the_backlog_counts_until_the_prompt_is_computed(make_request: MakeRequest) -> None:
    request = make_request(1, [5, 6, 7], (8,))
    assert request.backlog == 4
    request.decode.base = 3
    assert request.backlog == 1
    request.decode.is_prefilling = False
    assert request.backlog == 0


def test_a_continued_stream_does_not_owe_prompt_logprobs_again(make_request: MakeRequest) -> None:
    sampling = {"prompt_logprobs": 1}
    assert make_request(1, [5], sampling=sampling).output.wants_prompt_logprobs
    assert not make_request(1, [5], (6,), sampling=sampling).output.wants_prompt_logprobs

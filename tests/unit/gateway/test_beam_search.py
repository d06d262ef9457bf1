"""BeamSearch against a plain implementation of vLLM's rules."""

from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.beam_reference import next_token, reference
from tokenmesh.services.gateway.core.generation.request import BeamOptions
from tokenmesh.services.gateway.core.mesh.beam_search import BeamSearch
from tokenmesh.shared.messages.tokens import TokenLogprobs

ENDS = frozenset({0})
STOPS = frozenset({1})


def run(search: BeamSearch, seed: int, width: int) -> int:
    """Steps until it is over."""
    num_steps = 0
    while not search.is_over:
        search.advance([next_token(seed, beam.token_ids, 2 * width) for beam in search.open])
        num_steps += 1
    return num_steps


@given(
    seed=st.integers(0, 10**6),
    width=st.integers(1, 4),
    num_prompt=st.integers(1, 30),
    max_tokens=st.integers(1, 7),
    penalty=st.sampled_from([1.0, 0.0, -1.0, 0.5, 3.0]),
)
def test_the_result_equals_that_of_an_exhaustive_search(
    seed: int, width: int, num_prompt: int, max_tokens: int, penalty: float
) -> None:
    options = BeamOptions(width=width, length_penalty=penalty, end_ids=ENDS, stop_ids=STOPS)
    search = BeamSearch(options, num_prompt, max_tokens)
    assert run(search, seed, width) <= max_tokens
    answers = search.answers()
    expected = reference(seed, width, num_prompt, max_tokens, penalty, ENDS | STOPS)
    assert [(each.token_ids, each.cumulative, each.finish) for each in answers] == expected
    for each in answers:
        is_reported = each.finish == "stop" and each.token_ids[-1] in STOPS
        assert each.stop_token == (each.token_ids[-1] if is_reported else None)
        assert [entry.token_id for entry in each.logprobs] == list(each.token_ids)
        assert sum(entry.logprob for entry in each.logprobs) == each.cumulative


def test_a_search_ends_as_soon_as_its_result_is_certain() -> None:
    certain = TokenLogprobs(0, -0.01, 1, [0, 5], [-0.01, -9.0])
    search = BeamSearch(BeamOptions(width=1, length_penalty=0.0, end_ids=ENDS), 5, 1000)
    search.advance([certain])
    assert search.is_over
    assert [each.token_ids for each in search.answers()] == [(0,)]


def test_a_search_continues_while_a_longer_beam_may_win() -> None:
    entry = TokenLogprobs(0, -1.0, 1, [0, 5], [-1.0, -1.1])
    search = BeamSearch(BeamOptions(width=1, length_penalty=1.0, end_ids=ENDS), 2, 10)
    search.advance([entry])
    assert not search.is_over

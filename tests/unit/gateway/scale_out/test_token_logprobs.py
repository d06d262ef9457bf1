"""Log-probabilities are the same after generate and derender."""

from hypothesis import assume, given
from hypothesis import strategies as st

from tokenmesh.services.gateway.apis.scale_out.derender_whole import read_logprobs
from tokenmesh.services.gateway.apis.scale_out.generate_response import prompt_tables, token_logprob
from tokenmesh.shared.messages.tokens import TokenLogprobs


@st.composite
def entries(draw: st.DrawFn) -> TokenLogprobs:
    """Also with ranks that ties make differ from places."""
    ids = draw(st.lists(st.integers(0, 50), max_size=6, unique=True))
    own = draw(st.sampled_from([*ids, 51]))
    logprobs = sorted((draw(st.floats(-20, 0)) for _ in ids), reverse=True)
    logprob = logprobs[ids.index(own)] if own in ids else draw(st.floats(-30, -20))
    return TokenLogprobs(own, logprob, draw(st.integers(1, 9)), ids, logprobs)


@given(entries())
def test_the_most_likely_tokens_come_back_in_their_order(entry: TokenLogprobs) -> None:
    answer = token_logprob(entry, are_named=False)
    assert answer.top_logprobs[0].token_id == entry.token_id
    again = read_logprobs(answer, answer.top_logprobs, count=len(entry.top_ids), named=())
    assert again == entry


@given(entries())
def test_named_tokens_come_back_in_the_order_that_they_were_named(entry: TokenLogprobs) -> None:
    assume(entry.top_ids)
    answer = token_logprob(entry, are_named=True)
    assert all(each.rank is None for each in answer.top_logprobs[1:])
    again = read_logprobs(answer, answer.top_logprobs, count=None, named=entry.top_ids)
    assert again == entry


def test_a_prompts_own_token_comes_first_in_its_table() -> None:
    entry = TokenLogprobs(7, float("-inf"), 9, [3, 7], [-0.5, float("-inf")])
    first, table = prompt_tables([None, entry])
    assert first is None
    assert table is not None
    assert list(table) == ["7", "3"]
    assert table["7"] == {"logprob": -9999.0, "rank": 9, "decoded_token": None}

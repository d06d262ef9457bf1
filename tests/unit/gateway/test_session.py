"""The tokens of a stream under loss, repetition, delay and migration."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmesh.services.gateway.core.mesh.session import Session, SessionState
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import InvalidInput, KvSourceFailed, Overloaded, ProtocolError
from tokenmesh.shared.ids import WorkerId
from tokenmesh.shared.messages.failed import to_failed
from tokenmesh.shared.messages.tokens import Delta, FinishReason, TokenLogprobs
from tokenmesh.shared.tokens import pack_ids

WORKER = WorkerId("worker-1")
SETTINGS = GatewaySettings(resend_interval_s=0.1, stall_s=1.0, stall_max_s=4.0)


def started() -> Session:
    session = Session(SETTINGS)
    session.start(WORKER, 7, 0.0)
    return session


def delta(
    offset: int, ids: list[int], finish: FinishReason | None = None, attempt: int = 0
) -> Delta:
    return Delta(stream=1, attempt=attempt, offset=offset, token_ids=pack_ids(ids), finish=finish)


def taken(session: Session, message: Delta, now: float = 0.0) -> list[int] | None:
    output = session.take(message, now)
    return None if output is None else output.token_ids


def test_tokens_are_taken_in_order() -> None:
    session = started()
    assert taken(session, delta(0, [5, 6])) == [5, 6]
    assert taken(session, delta(2, [7], "stop")) == [7]
    assert session.token_ids == [5, 6, 7]
    assert session.state is SessionState.ENDED


def test_a_source_of_kv_that_failed_is_to_blame_and_not_the_worker_that_says_so() -> None:
    session = started()
    error = KvSourceFailed("KV does not come")
    error.source = "worker-2"
    ended = Delta(1, 0, 0, b"", "error", error=to_failed(error))
    assert session.take(ended, 0.0) is None
    assert session.state is SessionState.PLACING
    assert (session.lost_kind, session.lost_source) == ("kv source", "worker-2")
    # it says nothing about the request
    assert session.num_fruitless == 0
    session.start(WORKER, 7, 0.0)
    session.lose("worker gone", "dead")
    assert session.lost_source == ""


def test_a_repeated_delta_is_dropped_and_an_overlap_cut() -> None:
    session = started()
    taken(session, delta(0, [5, 6]))
    assert taken(session, delta(0, [5, 6])) is None
    assert taken(session, delta(1, [6, 7])) == [7]


def test_the_finish_reason_may_come_alone_or_with_known_tokens() -> None:
    for end in (delta(2, [], "length"), delta(0, [5, 6], "length")):
        session = started()
        taken(session, delta(0, [5, 6]))
        output = session.take(end, 0.0)
        assert output is not None
        assert (output.token_ids, output.finish) == ([], "length")


def test_tokens_of_another_attempt_are_dropped() -> None:
    session = started()
    session.lose("hung", "no answer")
    assert taken(session, delta(0, [5])) is None
    session.start(WorkerId("worker-2"), 8, 1.0)
    assert taken(session, delta(0, [5])) is None
    assert taken(session, delta(0, [6], attempt=1)) == [6]


def test_tokens_while_no_worker_is_chosen_are_dropped() -> None:
    session = Session(SETTINGS)
    assert taken(session, delta(0, [5])) is None


def test_a_gap_is_requested_at_once_and_then_at_intervals() -> None:
    session = started()
    assert not session.needs_resend(0.01)
    assert taken(session, delta(3, [9]), 0.02) is None
    assert session.needs_resend(0.02)
    assert not session.needs_resend(0.05)
    assert taken(session, delta(4, [9]), 0.06) is None
    assert not session.needs_resend(0.07)
    assert session.needs_resend(0.13)
    assert taken(session, delta(0, [6, 7, 8, 9, 9]), 0.14) == [6, 7, 8, 9, 9]
    assert not session.needs_resend(0.5)


def test_resends_after_silence_are_requested_at_growing_intervals() -> None:
    session = started()
    requested = [tick / 10 for tick in range(200) if session.needs_resend(tick / 10)]
    assert requested == [1.0, 3.0, 7.0, 11.0, 15.0, 19.0]


def test_an_aborted_attempt_leaves_the_session_without_a_worker() -> None:
    session = started()
    taken(session, delta(0, [5]))
    assert session.take(delta(1, [], "abort"), 0.0) is None
    assert (session.state, session.attempt, session.token_ids) == (SessionState.PLACING, 1, [5])


def test_a_retryable_error_ends_only_the_attempt() -> None:
    session = started()
    failed = to_failed(Overloaded("no blocks"))
    broken = Delta(stream=1, attempt=0, offset=0, token_ids=b"", finish="error", error=failed)
    assert session.take(broken, 0.0) is None
    assert (session.state, session.lost_because) == (SessionState.PLACING, "no blocks")


def test_an_error_that_is_not_retryable_ends_the_stream() -> None:
    session = started()
    failed = to_failed(InvalidInput("no such adapter"))
    broken = Delta(stream=1, attempt=0, offset=0, token_ids=b"", finish="error", error=failed)
    output = session.take(broken, 0.0)
    assert output is not None
    assert isinstance(output.error, InvalidInput)
    assert session.state is SessionState.ENDED


def test_an_error_without_a_reason_is_still_one() -> None:
    output = started().take(delta(0, [], "error"), 0.0)
    assert output is not None
    assert output.error is not None


def test_log_probabilities_are_cut_like_their_tokens() -> None:
    session = started()
    entries = [TokenLogprobs(each, -1.0, 1) for each in (5, 6)]
    taken(session, delta(0, [5]))
    both = Delta(stream=1, attempt=0, offset=0, token_ids=pack_ids([5, 6]), logprobs=entries)
    output = session.take(both, 0.0)
    assert output is not None
    assert output.logprobs == entries[1:]


def test_a_wrong_number_of_log_probabilities_is_a_protocol_error() -> None:
    entries = [TokenLogprobs(5, -1.0, 1)]
    both = Delta(stream=1, attempt=0, offset=0, token_ids=pack_ids([5, 6]), logprobs=entries)
    output = started().take(both, 0.0)
    assert output is not None
    assert isinstance(output.error, ProtocolError)


WORD = list(range(100, 130))
STORM_TICKS = 100
TICK_S = 0.05


@settings(max_examples=300)
@given(seed=st.integers(0, 2**32))
def test_loss_repetition_and_reordering_deliver_each_token_once(seed: int) -> None:
    """Workers answer Resend and sometimes die; the network loses, repeats and reorders messages.

    Then the faults stop, and the rest must arrive.
    """
    chance = Random(seed)
    session, wire, delivered = started(), list[Delta](), list[int]()
    sent = 0
    for tick in range(1000):
        now = tick * TICK_S
        is_stormy = tick < STORM_TICKS
        if is_stormy and chance.random() < 0.03:
            session.lose("gone", "test")
            sent = len(session.token_ids)
            session.start(WorkerId(f"worker-{session.attempt}"), 1, now)
        if session.needs_resend(now):
            sent = len(session.token_ids)
        ids = WORD[sent : sent + chance.randint(1, 4)]
        finish: FinishReason | None = "stop" if sent + len(ids) == len(WORD) else None
        message = delta(sent, ids, finish, session.attempt)
        sent += len(ids)
        copies = chance.choice([0, 1, 1, 1, 2]) if is_stormy else 1
        wire += [message] * copies
        if is_stormy and chance.random() < 0.3:
            chance.shuffle(wire)
        num_late = chance.randint(0, len(wire)) if is_stormy else 0
        for arrived in wire[: len(wire) - num_late]:
            output = session.take(arrived, now)
            delivered += output.token_ids if output is not None else []
        wire = wire[len(wire) - num_late :]
        if session.state is SessionState.ENDED:
            break
    assert delivered == WORD
    assert session.token_ids == WORD


def test_losses_without_a_token_between_them_are_counted() -> None:
    session = started()
    for kind, count in (("worker gone", 1), ("worker hung", 1), ("draining", 1), ("broken off", 2)):
        session.lose(kind, "why")
        assert session.num_fruitless == count
        session.start(WORKER, 7, 0.0)
    taken(session, delta(0, [5], attempt=4))
    session.lose("worker gone", "why")
    assert session.num_fruitless == 1

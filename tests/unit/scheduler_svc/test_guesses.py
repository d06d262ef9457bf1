"""Guesses: what most workers held of the last prompt that began alike."""

from tokenmesh.services.scheduler_svc.index import guesses
from tokenmesh.services.scheduler_svc.index.guesses import Guesses


def test_most_workers_count_not_the_one_with_the_conversation() -> None:
    known = Guesses()
    known.note(b"12345678abcdefgh", [64, 64, 900, 64])
    assert known.of(b"12345678ijklmnop") == 64
    assert known.of(b"87654321") == 0
    assert known.of(b"") == 0


def test_what_nobody_holds_any_more_is_not_guessed() -> None:
    known = Guesses()
    known.note(b"12345678", [5])
    known.note(b"12345678", [0])
    assert known.of(b"12345678") == 0


def test_the_oldest_make_room() -> None:
    known, limit = Guesses(), guesses._MAX_PROMPTS
    for number in range(limit + 3):
        known.note(number.to_bytes(8, "little"), [1])
        known.note(number.to_bytes(8, "little"), [2])
    assert [known.of(number.to_bytes(8, "little")) for number in (0, 2, 3)] == [0, 0, 2]
    assert len(known._depths) == limit

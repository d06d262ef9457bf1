"""Expressions of adapters' configs match as Python's own, in a bounded number of steps."""

import re
from contextlib import suppress
from random import Random

import pytest

from tokenmesh.engine.adapters.name_pattern import (
    NamePattern,
    Steps,
    UnusablePattern,
)

ATOMS = [
    *("a", "b", ".", r"\.", "[ab]", "[^a]", r"\d", r"\w", r"\W", r"\s", r"[\d.]", "[a-c.]"),
    *(r"\b", r"\B", "^", "$", r"\A", r"\Z", r"(?<!a)", r"(?<=b.)"),
]
REPEATS = ["*", "+", "?", "{2}", "{1,3}", "{0,}", "*?", "+?", "{0,2}?"]


def expression(random: Random, depth: int) -> str:
    def inner() -> str:
        return expression(random, depth - 1)

    kind = random.random()
    if depth == 0 or kind < 0.35:
        return random.choice(ATOMS)
    if kind < 0.6:
        return inner() + inner()
    if kind < 0.7:
        return f"({inner()}|{inner()})"
    if kind < 0.8:
        return f"(?:{inner()}){random.choice(REPEATS)}"
    return f"({random.choice(['?=', '?!', '?:', '', '?P<n>'])}{inner()})"


def test_an_expression_matches_whatever_pythons_own_does() -> None:
    random = Random(1)
    tried = matched = 0
    while tried < 6000:
        text = expression(random, 4)
        try:
            own = re.compile(text)
        except re.error:  # two groups of one name, or nothing to repeat
            continue
        pattern = NamePattern(text, Steps())
        for _ in range(3):
            name = "".join(random.choice("ab.c1 ") for _ in range(random.randrange(1, 9)))
            expected = own.fullmatch(name) is not None
            assert pattern.fullmatch(name) == expected, (text, name)
            tried, matched = tried + 1, matched + expected
    assert matched > 200


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("(a+)+b", "a" * 1000),
        ("((a*)*)*b", "a" * 1000),
        ("(?:(?:(?:a{1,50}){1,50}){1,50}){1,50}b", "a" * 1000),
        (".*.*.*.*.*.*.*.*x", "a" * 1000),
        (f"{'(' * 40}a*{')*' * 40}b", "a" * 200),
        (f"(?:{'a?' * 200}){{0,60000}}{'a' * 200}b", "a" * 1000),
        ("(?:(?:(?:){60000}){60000}){2}b", "a"),
        (f"[{''.join(map(chr, range(300, 2000)))}]*b", "a" * 1000),
    ],
)
def test_no_expression_takes_more_steps_than_it_may(text: str, name: str) -> None:
    steps = Steps()
    with suppress(UnusablePattern):
        assert not NamePattern(text, steps).fullmatch(name)
    assert steps.left > -len(name) * 200, "the last count may be large, but no more than one"


def test_steps_are_shared_by_all_names() -> None:
    pattern = NamePattern("(?:a|b)*c", Steps(300))
    with pytest.raises(UnusablePattern, match="takes too long"):
        all(not pattern.fullmatch("abab") for _ in range(300))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("(", "is not a regular expression: missing"),
        ("a{99999999999}", "is not a regular expression"),
        ("(" * 2000 + ")" * 2000, "is not a regular expression|is nested too deeply"),
        (r"(a)\1", "has groupref, which is not served"),
        (r"(a)?(?(1)b|c)", "has groupref_exists, which is not served"),
        ("(?>a*)b", "has atomic_group, which is not served"),
        ("a++b", "has possessive_repeat, which is not served"),
        ("(?i)a", "has flags"),
        ("(?i:a)", "has flags"),
        ("a" * 5000, "has more than 4096 characters"),
    ],
)
def test_what_cannot_be_bounded_or_read_is_refused_with_the_reason(text: str, problem: str) -> None:
    with pytest.raises(UnusablePattern, match=problem):
        NamePattern(text, Steps()).fullmatch("aab")


def test_a_name_has_a_bound() -> None:
    with pytest.raises(UnusablePattern, match="a name of more than 1024 characters"):
        NamePattern("a*", Steps()).fullmatch("a" * 1025)

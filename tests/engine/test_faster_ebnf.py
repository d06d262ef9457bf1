"""EBNF rewritten for xgrammar allows what it allowed before, token by token."""

import random
from functools import cache

import numpy as np
import pytest
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rounds import counts
from tokenmesh.engine.grammar.ebnf import NotRead, read_rules, write_rules
from tokenmesh.engine.grammar.faster_ebnf import faster_ebnf

PIECES = [*'abcx"\\+( )', "ab", "ba", "abc", "a+b", "bx", " a", "cc", "xx", '"a', 'b"', ""]
INFO = xgrammar.TokenizerInfo(
    [piece.encode() for piece in PIECES],
    xgrammar.VocabType.RAW,
    vocab_size=len(PIECES),
    stop_token_ids=[len(PIECES) - 1],
)
JSON = r"""root   ::= object  # the best known of all
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt/] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]*)) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
ws ::= [ \t\n]*
"""


@cache
def compiled(text: str) -> xgrammar.CompiledGrammar:
    return xgrammar.GrammarCompiler(INFO, max_threads=1, cache_enabled=False).compile_grammar(text)


def masks_along(text: str, choices: random.Random, steps: int = 12) -> list[list[int]]:
    """The tokens that are allowed in each step, where each next token is drawn at random."""
    matcher = xgrammar.GrammarMatcher(compiled(text))
    seen: list[list[int]] = []
    while len(seen) < steps and not matcher.is_terminated():
        mask = np.zeros((1, 1), dtype=np.int32)
        matcher.fill_next_token_bitmask(mask, 0)
        seen.append([each for each in range(len(PIECES)) if mask[0, 0] >> each & 1])
        if not seen[-1]:
            break
        matcher.accept_token(choices.choice(seen[-1]))
    return seen


def tokens_along(text: str, choices: random.Random, steps: int = 12) -> list[list[int]]:
    """As `masks_along`, by trying each token: xgrammar's masks of a rule that holds itself and ends
    with a repeated class leave out tokens that it accepts."""
    matcher = xgrammar.GrammarMatcher(compiled(text))

    def is_accepted(token: int) -> bool:
        accepted = matcher.accept_token(token)
        if accepted:
            matcher.rollback(1)
        return accepted

    seen: list[list[int]] = []
    while len(seen) < steps and not matcher.is_terminated():
        seen.append([each for each in range(len(PIECES)) if is_accepted(each)])
        if not seen[-1]:
            break
        matcher.accept_token(choices.choice(seen[-1]))
    return seen


TEXTS = st.sampled_from(['"a"', '"ab"', '"+"', '"\\""', "[ab]", "[b-c]", "[^a]", "[x-]", '"("'])
NAMES = st.sampled_from(["one", "two", "root"])
TIMES = st.sampled_from(["*", "+", "?", "{1,2}", "{2}"])


GROUPS = st.tuples(st.lists(TEXTS, min_size=2, max_size=3), st.sampled_from(["*", "+"])).map(
    lambda both: f"({' | '.join(both[0])}){both[1]}"
)


def bodies() -> st.SearchStrategy[str]:
    def more(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        parts = st.lists(inner, min_size=1, max_size=3)
        return st.one_of(
            parts.map(lambda each: f"({' | '.join(each)})"),
            parts.map(" ".join),
            st.tuples(inner, TIMES).map(lambda both: f"({both[0]}){both[1]}"),
        )

    return st.recursive(st.one_of(TEXTS, GROUPS, GROUPS, NAMES), more, max_leaves=8)


@pytest.mark.timeout(60)
@counts("num_examples", 50, 300)
def test_a_rewritten_grammar_allows_the_same_in_every_step(num_examples: int) -> None:
    @settings(max_examples=num_examples)
    @given(bodies(), bodies(), bodies(), st.integers(0, 9))
    def check(root: str, one: str, two: str, seed: int) -> None:
        text = f'root ::= "x" ({root})\none ::= "a" | {one}\ntwo ::= {two} | "b"\n'
        faster = faster_ebnf(text)
        if faster is None:
            return
        try:
            compiled(text)
        except RuntimeError:
            return
        for walk in range(seed, seed + 3):
            before = tokens_along(text, random.Random(walk))
            assert tokens_along(faster, random.Random(walk)) == before, faster

    check()


def test_json_in_ebnf_is_rewritten_with_its_strings_in_a_class() -> None:
    faster = faster_ebnf(JSON)
    assert faster is not None
    assert r'"\"" [^"\\\x7F\x00-\x1F]* ("\\"' in faster
    assert "ws" not in faster
    rng = random.Random(3)
    for _ in range(20):
        seed = rng.random()
        assert masks_along(faster, random.Random(seed)) == masks_along(JSON, random.Random(seed))


@pytest.mark.parametrize(
    ("text", "rewritten"),
    [
        ("root ::= ([a-c] | [x])*", "root ::= [a-cx]*"),
        ('root ::= ([a] | "b")*', 'root ::= [a]* ("b" [a]*)*'),
        ('root ::= ([a] | "b")+', 'root ::= ([a]+ ("b" [a]*)*) | ("b" [a]*)+'),
        ('root ::= w "x"\nw ::= [a]+', 'root ::= [a]+ "x"'),
    ],
)
def test_grammars_are_rewritten_like_this(text: str, rewritten: str) -> None:
    assert faster_ebnf(text) == rewritten


@pytest.mark.parametrize(
    "text",
    [
        'root ::= "a" (="b")',
        'root ::= TagDispatch(("a", one))\none ::= "b"',
        "root ::= one",
        'one ::= "a"',
        '"a"\nroot ::= "b"',
        'root ::= "a" | ',
        'root ::= ("a"',
        'root ::= "a")',
        'root ::= "a"\nroot ::= "b"',
        "start: /a/",
        "root ::= " + "(" * 60 + '"a"' + ")" * 60,
        "root ::= ([^a] | [b-])*",
    ],
)
def test_what_is_not_understood_or_gains_nothing_is_left_alone(text: str) -> None:
    assert faster_ebnf(text) is None


def test_rules_are_put_where_they_are_used_only_while_there_is_room() -> None:
    word = " ".join(['"a"'] * 50)
    text = f"root ::= word word word word\nword ::= {word}"
    assert faster_ebnf(text) is None
    many = "\n".join(f'r{n} ::= "a" r{n + 1}' for n in range(1000))
    assert faster_ebnf(f'root ::= r0\n{many}\nr1000 ::= "b"') is None


def test_what_is_read_is_written_as_it_was() -> None:
    rules = read_rules(JSON)
    assert read_rules(write_rules(rules)) == rules
    with pytest.raises(NotRead):
        read_rules("root ::= \x00")

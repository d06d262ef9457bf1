"""The contract of matchers, and both libraries held to it."""

import json
import math
import random

import numpy as np
import pytest

from tests.fakes.grammars import EOS, VOCAB, Grammars, json_schema, make_checkpoint
from tokenmesh.engine.grammar.follower import Follower
from tokenmesh.engine.grammar.matcher import (
    CannotCompile,
    GrammarFailed,
    Masks,
    Matcher,
    num_words,
)
from tokenmesh.shared.config.worker import GrammarBackend
from tokenmesh.shared.messages.structured import Structured

SCHEMA = json_schema(
    {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "s": {"type": "string"}},
        "required": ["n", "s"],
    }
)
GRAMMARS = (SCHEMA, Structured(kind="regex", text="[ab]{2,6}c?"), Structured(kind="json_object"))


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    return Grammars(make_checkpoint(tmp_path_factory.mktemp("matchers")))


@pytest.fixture(params=["xgrammar", "guidance"])
def setting(request: pytest.FixtureRequest) -> GrammarBackend:
    return request.param  # type: ignore[no-any-return]


def empty(count: int) -> Masks:
    return np.full((count, num_words(VOCAB)), 0x55, dtype=np.int32)


def allowed(masks: Masks, index: int = 0) -> set[int]:
    bits = np.unpackbits(masks[index].view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def next_of(matcher: Matcher) -> set[int]:
    masks = empty(1)
    matcher.fill(masks, 0)
    return allowed(masks)


def test_no_end_token_is_allowed_while_a_stream_that_owes_an_answer_reasons(
    grammars: Grammars, setting: GrammarBackend
) -> None:
    ends = (EOS, 31, 63, 64)
    matcher = grammars.compile(SCHEMA, setting).start()
    follower = Follower(matcher, [[5]], math.inf, ends)
    masks = empty(1)
    follower.fill(masks, 0)
    assert allowed(masks) == set(range(32 * num_words(VOCAB))) - set(ends)
    follower.append(5)
    follower.fill(masks, 0)
    assert allowed(masks) == next_of(grammars.compile(SCHEMA, setting).start())


@pytest.mark.parametrize("structured", GRAMMARS, ids=lambda each: each.kind)
def test_what_is_allowed_is_accepted_and_what_is_not_is_not(
    grammars: Grammars, setting: GrammarBackend, structured: Structured
) -> None:
    rng = random.Random(5)
    for _ in range(4):
        matcher = grammars.compile(structured, setting).start()
        for _ in range(25):
            tokens = next_of(matcher)
            assert tokens
            forbidden = rng.sample(sorted(set(range(VOCAB)) - tokens), 3)
            assert not any(matcher.accept(each) for each in forbidden)
            assert next_of(matcher) == tokens
            if not matcher.accept(rng.choice(sorted(tokens))):
                pytest.fail("an allowed token was not accepted")
            if matcher.is_terminated():
                assert not matcher.accept(EOS)
                break


CHOICES = [
    "plain",
    "na\u00efve \u65e5\u672c \U0001f468\u200d\U0001f469\u200d\U0001f466 \U0001f1e9\U0001f1ea",
    'quote " backslash \\ slash / \\u0041 \\n {[(|)]} ::=',
    "".join(map(chr, range(1, 32))) + "\x7f\x80\u2028\ufeff\uffff\U0010ffff",
]


@pytest.mark.parametrize("chosen", CHOICES)
def test_a_choice_is_written_as_it_was_given(
    grammars: Grammars, setting: GrammarBackend, chosen: str
) -> None:
    grammar = grammars.compile(Structured(kind="choice", text=json.dumps(CHOICES)), setting)
    matcher = grammar.start()
    for position, token in enumerate(grammars.ids(chosen)):
        assert matcher.accept(token), chosen.encode()[:position]
    assert next_of(matcher) == {EOS}


def test_special_and_padded_ids_are_never_allowed(
    grammars: Grammars, setting: GrammarBackend
) -> None:
    tokens = next_of(grammars.compile(Structured(kind="regex", text="(.|\n)*"), setting).start())
    assert tokens & set(grammars.tokens.special_ids) == {EOS}
    assert len(tokens) > 250


def test_eos_is_allowed_where_the_text_may_end(grammars: Grammars, setting: GrammarBackend) -> None:
    matcher = grammars.compile(Structured(kind="regex", text="ab?"), setting).start()
    a, b = grammars.ids("ab")
    assert EOS not in next_of(matcher)
    assert not matcher.accept(EOS)
    assert matcher.accept(a)
    assert next_of(matcher) >= {EOS, b}
    assert matcher.accept(b)
    assert next_of(matcher) == {EOS}
    assert not matcher.is_terminated()
    assert matcher.accept(EOS)
    assert matcher.is_terminated()


@pytest.mark.parametrize("structured", GRAMMARS, ids=lambda each: each.kind)
def test_a_rollback_leads_back_to_where_it_was(
    grammars: Grammars, setting: GrammarBackend, structured: Structured
) -> None:
    rng = random.Random(9)
    matcher = grammars.compile(structured, setting).start()
    seen = [next_of(matcher)]
    while len(seen) < 30 and not matcher.is_terminated():
        assert matcher.accept(rng.choice(sorted(seen[-1])))
        seen.append(set() if matcher.is_terminated() else next_of(matcher))
    while len(seen) > 1:
        count = rng.randint(1, min(4, len(seen) - 1))
        matcher.rollback(count)
        del seen[-count:]
        assert not matcher.is_terminated()
        assert next_of(matcher) == seen[-1]


def test_matchers_of_one_grammar_know_nothing_of_each_other(
    grammars: Grammars, setting: GrammarBackend
) -> None:
    grammar = grammars.compile(Structured(kind="regex", text="ab"), setting)
    first, second = grammar.start(), grammar.start()
    a, b = grammars.ids("ab")
    assert first.accept(a)
    assert not second.accept(b)
    assert second.accept(a)
    assert first.accept(b)


def test_both_allow_the_same_tokens(grammars: Grammars) -> None:
    structured = Structured(kind="regex", text="(ab|ac)[x-z]{2}")
    ours = [grammars.compile(structured, each).start() for each in ("xgrammar", "guidance")]
    for token in grammars.ids("acyz"):
        singles = [
            {t for t in next_of(each) if len(grammars.tokens.tokens[t]) == 1} for each in ours
        ]
        assert token in singles[0] & singles[1]
        assert all(each.accept(token) for each in ours)


@pytest.mark.parametrize(
    ("setting", "structured"),
    [
        ("xgrammar", json_schema({"type": "string", "pattern": "a"})),
        ("xgrammar", json_schema({"type": "integer"}, whitespace_pattern=" ?")),
        ("xgrammar", Structured(kind="grammar", text="start: /a/")),
        ("guidance", json_schema({"type": "array", "uniqueItems": True})),
        ("guidance", Structured(kind="structural_tag", text='{"format": {"type": "any_text"}}')),
        ("auto", Structured(kind="regex", text="(")),
        ("auto", Structured(kind="grammar", text="root ::= nothing")),
        ("auto", json_schema({"type": "nothing"})),
    ],
)
def test_what_a_library_cannot_do_it_says(
    grammars: Grammars, setting: GrammarBackend, structured: Structured
) -> None:
    with pytest.raises(CannotCompile) as caught:
        grammars.compile(structured, setting)
    assert caught.value.message


def test_text_is_free_until_a_marker_and_behind_its_end(
    grammars: Grammars, setting: GrammarBackend
) -> None:
    tag = {
        "structures": [
            {"begin": f"<call>{name}:", "schema": schema, "end": "</call>"}
            for name, schema in (("f", {"enum": [1, 2]}), ("g", {"type": "object"}))
        ],
        "triggers": ["<call>"],
    }
    structured = Structured(kind="structural_tag", text=json.dumps(tag))
    for text, is_allowed in (
        ("no call", True),
        ("a < b <call>f:1</call> and <call>g:{}</call>.", True),
        ("<call>h", False),
        ("<call>f:3", False),
        ("<call>f:1</call>, <call>g:[", False),
    ):
        matcher = grammars.compile(structured, setting).start()
        ids = grammars.ids(text)
        assert all(matcher.accept(each) for each in ids[:-1]), text
        assert matcher.accept(ids[-1]) is is_allowed, text
        if is_allowed:
            assert EOS in next_of(matcher), text


def test_schemas_in_a_tag_are_followed_to_the_letter(grammars: Grammars) -> None:
    def tag(schema: object) -> Structured:
        structures = [{"begin": "<f>", "schema": schema, "end": "</f>"}]
        text = json.dumps({"structures": structures, "triggers": ["<f>"]})
        return Structured(kind="structural_tag", text=text)

    with pytest.raises(CannotCompile, match="maxLength"):
        grammars.compile(tag({"type": "string", "maxLength": 2}), "xgrammar")
    matcher = grammars.compile(tag({"type": "string", "maxLength": 2}), "auto").start()
    assert all(matcher.accept(each) for each in grammars.ids('<f>"ab'))
    assert not matcher.accept(grammars.ids("c")[0])


def test_a_limit_of_the_library_is_named_when_a_token_exceeds_it(grammars: Grammars) -> None:
    grammar = grammars.compile(Structured(kind="grammar", text="start: " + '("a"|"b")? ' * 600))
    follower = Follower(grammar.start(), [], math.inf, (EOS,))
    for token_id in grammars.ids("ab"):
        follower.append(token_id)
    with pytest.raises(GrammarFailed, match=r"items; max is"):
        follower.fill(empty(1), 0)

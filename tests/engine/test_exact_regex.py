"""Regular expressions mean what they mean in Python, or are refused."""

import json
import re
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmesh.engine.grammar.guidance_backend import GuidanceBackend
from tokenmesh.engine.grammar.matcher import CannotCompile, Grammar
from tokenmesh.engine.grammar.token_table import TokenTable
from tokenmesh.engine.grammar.xgrammar_backend import XGrammarBackend
from tokenmesh.shared.messages.structured import Structured

EOS = 256
TABLE = TokenTable([*(bytes([each]) for each in range(256)), b""], (EOS,))
BACKENDS = (XGrammarBackend(TABLE), GuidanceBackend(TABLE))
TEXTS = [
    *("", "a", "b", "A", "Z", "1", "x", "\n", "-", "^", "$", " ", ".", "_", "é", "٣", "\u2028"),
    *("ab", "ba", "aa", "aaa", "abab", "yes", "AyesZ", "a^b", "a$", "$a", "{", "a{", "a{1", "&"),
    *("]", "[", "\\", "\t", "x41", "x{41}", "aab", "a\n", "a b", "u0041", "0", "\x00", "(", "|"),
    *("²", "½", "\u0301", "\x1c", "e\u0301", "<", ">"),
    *("[a", "a&b", "&&", "a:", ":]", "l]", "K", "z", "Q.E", "A.", "h", "41"),
]


def compiled(pattern: str) -> list[Grammar]:
    """The grammars of the libraries that accept the pattern."""
    found: list[Grammar] = []
    for backend in BACKENDS:
        try:
            data = backend.compile(Structured(kind="regex", text=pattern))
        except CannotCompile:
            continue
        found.append(backend.load(data))
    return found


def takes(grammar: Grammar, text: str) -> bool:
    matcher = grammar.start()
    return all(matcher.accept(each) for each in [*text.encode(), EOS])


def check(pattern: str) -> int:
    """Compare with Python; the number of libraries that take it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = re.compile(pattern)
            in_ascii = re.compile(pattern, re.ASCII)
    except re.error:
        return 0
    grammars = compiled(pattern)
    for grammar in grammars:
        for text in TEXTS:
            if takes(grammar, text):
                assert expected.fullmatch(text), (pattern, text)
            elif text.isascii():
                # `\s` may be that of ASCII, which has no separators
                is_asked = expected.fullmatch(text) and in_ascii.fullmatch(text)
                assert not is_asked, (pattern, text)
    return len(grammars)


@pytest.mark.parametrize(
    "pattern",
    [
        *("yes", "a|b", "(a|b)+", "(?:ab)*", "^yes$", "^(yes|no)$", "a{2}", "a{1,2}b?", "[a-c]+"),
        *(r"\d+", r"\w\s\d", r"[\w-]+", ".*", r"[^\n]+", r"\.", r"\x41", r"\u0041", r"a\{1\}"),
        *("a+?", "(^a)", "(a$)|b", r"[^\d]", r"\D", r"(?i)a", r"(?P<n>a)", r"[\s\S]", r"\Aa"),
        *("[[a]", "[a&&b]", "[[:alpha:]]", "[]a]", "é", r"[\]]", r"\[a\]", "a{0}", r"\-", "]"),
        *(r"\W", r"\S", r"[\W-]", r"[^\W]", r"[^\S\w]", r"[^\s-]+", r"(?i)\w[\wé]", r"\<\>[\<]"),
        *("[]&x]", "[^]&]+", "[]]", "[^]a]"),
    ],
)
def test_expressions_that_both_or_one_of_the_libraries_follow(pattern: str) -> None:
    assert check(pattern) >= 1


@pytest.mark.parametrize(
    "pattern",
    [
        *(
            r"\Ayes\Z",
            "a^b",
            "a$b",
            "$a",
            r"\bA\b",
            r"a\Bb",
            r"(a)\1",
            "(?=a)a",
            "(?<=a)b",
            "(?>a)",
        ),
        *("a++", "a*+", "a{1,2}+", "a{,2}", "a{1", "{", "(?#c)a", r"\N{DIGIT ONE}", "(?m)^a$"),
        *(r"\Q.\E", r"\cA", r"\h", r"\K", r"\y", r"\X", "(?R)", "a**", r"\e", "a{ 1}", "[^]"),
        *("[]&&x]", "[^]&&x]", "^[^]&&x]+$", "[]--a]", "[][a]", "[]", "[]a"),
        *("(?x)[a b]", "(?x: a b)", "(?ix)a", "(?sx-i:a)"),
    ],
)
def test_what_no_library_follows_is_refused(pattern: str) -> None:
    check(pattern)
    assert not compiled(pattern)


def test_patterns_of_schemas_mean_what_they_mean_in_python() -> None:
    texts = ['"1"', '"½"', '"e\u0301"', '"\x1c"', '{"é":1}', '{"½":1}', '{"-":1}', '{"-":"a"}']
    for schema, taken in (
        ({"type": "string", "pattern": r"^\w$"}, ['"1"', '"½"']),
        ({"patternProperties": {r"^\w$": {"type": "string"}}, "type": "object"}, texts[6:]),
    ):
        backend = BACKENDS[1]
        grammar = backend.load(backend.compile(Structured(kind="json", text=json.dumps(schema))))
        assert [text for text in texts if takes(grammar, text)] == taken


@pytest.mark.parametrize("pattern", [r"[A-\w]", r"[\w-.]", r"[\t-\s]", r"[\W-~]", r"[+-\S]"])
def test_a_class_of_characters_ends_no_range(pattern: str) -> None:
    assert not compiled(pattern)


def test_a_repetition_without_its_least_number_is_refused_with_what_to_write() -> None:
    for backend in BACKENDS:
        with pytest.raises(CannotCompile, match=r"\{0,2\} where \{,2\} is meant"):
            backend.compile(Structured(kind="regex", text="a{,2}"))


def test_code_points_in_braces_are_honored() -> None:
    for pattern in (r"\x{41}", r"\u{41}"):
        (grammar,) = compiled(pattern)
        assert [text for text in TEXTS if takes(grammar, text)] == ["A"]


ATOM = st.sampled_from(
    [
        *(
            "a",
            "b",
            "x",
            "1",
            "-",
            " ",
            "é",
            ".",
            "^",
            "$",
            "{",
            "}",
            "]",
            "&",
            "[a-c]",
            "[^a]",
            "[]a]",
        ),
        *(
            r"\d",
            r"\w",
            r"\s",
            r"\D",
            r"\W",
            r"\S",
            r"[\d-]",
            r"[^\w]",
            r"[\D]",
            r"[\W-]",
            r"[^\Sa]",
            r"[-\s]",
            r"\<",
            r"[a\]]",
            r"[\[a]",
        ),
        *(r"\A", r"\Z", r"\z", r"\b", r"\B", r"\n", r"\t", r"\x41", r"\u0041", r"\.", r"\^", r"\$"),
        *(
            r"\{",
            r"\\",
            r"\1",
            r"\0",
            r"\e",
            r"\h",
            r"\q",
            r"\K",
            "[[a]",
            "[a&&b]",
            "[a--b]",
            "[^]",
            "[]&&x]",
            "[^]&&x]",
        ),
    ]
)
TIMES = st.sampled_from(
    ["", "", "", "*", "+", "?", "*?", "+?", "++", "{2}", "{1,2}", "{,2}", "**", "{2}?"]
)
GROUP = st.sampled_from(
    [
        "(",
        "(?:",
        "(?P<n>",
        "(?=",
        "(?!",
        "(?<=",
        "(?>",
        "(?i:",
        "(?i)(",
        "(?s:",
        "(?x:",
        "(?x)(",
        "(?ix:",
    ]
)
REGEX = st.recursive(
    st.tuples(ATOM, TIMES).map("".join),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.tuples(inner, inner).map("|".join),
        st.tuples(GROUP, inner, st.just(")"), TIMES).map("".join),
    ),
    max_leaves=5,
)


@settings(max_examples=150)
@given(REGEX)
def test_random_expressions_mean_what_they_mean_in_python(pattern: str) -> None:
    check(pattern)

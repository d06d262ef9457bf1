"""Lark grammars of what a JSON string says, against the same grammars of plain text."""

import json
import random
from collections.abc import Iterator

import numpy as np
import pytest

from tokenmesh.engine.grammar.follower import Follower
from tokenmesh.engine.grammar.guidance_backend import GuidanceBackend
from tokenmesh.engine.grammar.lark_terminals import TERMINALS
from tokenmesh.engine.grammar.matcher import CannotCompile, Matcher, num_words
from tokenmesh.engine.grammar.token_table import TokenTable
from tokenmesh.engine.grammar.xgrammar_backend import XGrammarBackend
from tokenmesh.services.gateway.apis.openai.tools import named_call, required_calls
from tokenmesh.services.gateway.parsers.parser import ToolSchema
from tokenmesh.shared.messages.structured import CallForm, CallForms, Structured

EOS, MARK = 256, 257
LONG = [b'{"', b'":"', b'"}', rb"\n", rb"\\", rb"\"", b'": "', b"ab", b'"}}', rb"\u0", b"\xc3\xa9"]
SHORT = [*(bytes([each]) for each in range(256)), b"", b""]
TABLE = TokenTable([*SHORT, *LONG], (EOS,), {"<|call|>": MARK})
BACKEND = GuidanceBackend(TABLE)
BYTES = GuidanceBackend(TokenTable(SHORT, (EOS,)))
CHARS = 'aBb"\\\n\t\x1a\x1b x/zéqQ]!1'
PATCH = """
start: "*** Begin Patch" LF hunk+ "*** End Patch" LF?
hunk: "*** Add File: " filename LF add_line+
    | "*** Update File: " filename LF change+
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change: ("@@" | "@@ " /(.+)/) LF | ("+" | "-" | " ") /(.*)/ LF
%import common.LF
"""
GRAMMARS = [
    'start: "a\\"b" X+\nX: /[^x\\n]|\\n\\t/',
    'start: LINE LF B // a comment\nLINE: /[^ ]+/\nLF: "\\n"\nB: /[a-z]/ | "\\\\"\n%ignore " "',
    "%import common.LF -> END\n%import common (WORD, ESCAPED_STRING)\n"
    "start: WORD END ESCAPED_STRING END?",
    '%llguidance {}\nstart: "aB\\n"i "\\x1a".."\\u002a" /\\x{22}|\\D|\\s/ /[\\W]/i',
    'start: T | x\nT: /[\\p{L}1]{1,3}/ & /[^q"\\\\\\x00-\\x1f]{2}/\n'
    '?x: y -> start\n  | "z"\n!y: "q"~1..2 "Q"{1,2} (/[ab\\\\]*/ "!" | "\\t"*)+ "]"',
    'start: /[\\t-"]+/ TAIL? \nTAIL: CHAR+ "!"\nCHAR: /[\\/\\\\x]+|(?i:Q)(?s:.)$/',
]


def custom(definition: str, name: str = "patch") -> ToolSchema:
    parameters = {
        "type": "object",
        "properties": {"input": {"type": "string", "lark": definition}},
        "required": ["input"],
        "additionalProperties": False,
    }
    return ToolSchema(name=name, parameters=parameters, strict=True)


def start(structured: Structured, backend: GuidanceBackend = BYTES) -> Matcher:
    return backend.load(backend.compile(structured)).start()


def lark(text: str) -> Structured:
    return Structured(kind="grammar", text=text)


def takes(matcher: Matcher, text: str) -> bool:
    parts = text.split("<|call|>")
    ids = [*parts[0].encode()]
    for part in parts[1:]:
        ids += [MARK, *part.encode()]
    count = 0
    for count, each in enumerate([*ids, EOS], 1):
        if not matcher.accept(each):
            matcher.rollback(count - 1)
            return False
    matcher.rollback(count)
    return True


def allowed(matcher: Matcher) -> list[int]:
    masks = np.zeros((1, num_words(len(TABLE.tokens))), dtype=np.int32)
    matcher.fill(masks, 0)
    found = np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little"))
    return [int(each) for each in found if each < len(TABLE.tokens)]


def texts(grammar: str, draw: random.Random, count: int) -> Iterator[str]:
    """Texts of the grammar, or beginnings of some, and others with one more character."""
    plain = start(lark(grammar))
    for _ in range(count):
        out: list[int] = []
        while len(out) < 20:
            found = allowed(plain)
            if not {*found} - {EOS} or (EOS in found and draw.random() < 0.4):
                break
            known = [each for each in found if each < 256 and chr(each) in CHARS]
            out.append(draw.choice(known or [each for each in found if each < EOS]))
            plain.accept(out[-1])
        plain.rollback(len(out))
        text = bytes(out).decode(errors="ignore")
        yield text
        place = draw.randrange(len(text) + 1)
        yield text[:place] + draw.choice(CHARS) + text[place:]


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_an_input_is_taken_where_the_grammar_takes_its_text(grammar: str) -> None:
    plain, quoted = start(lark(grammar)), start(named_call(custom(grammar)))
    num_taken = 0
    for text in texts(grammar, random.Random(0), 60):
        is_taken = takes(plain, text)
        num_taken += is_taken
        written = json.dumps({"input": text}, ensure_ascii=False, separators=(",", ":"))
        assert takes(quoted, written) is is_taken, repr(text)
    assert 0 < num_taken < 120


def test_patches_with_quotes_and_backslashes_follow_the_grammar_of_a_coding_agent() -> None:
    quoted = start(named_call(custom(PATCH)))
    right = """*** Begin Patch
*** Update File: a\\b "c".py
@@ def f():
-    print("\\n")
+\tprint("a\\tb")
+
 é
*** Add File: x
+"
*** End Patch"""
    for text in (right, right + "\n"):
        assert takes(quoted, json.dumps({"input": text}, ensure_ascii=False, separators=(",", ":")))
    for wrong in (
        right[4:],
        right + "\n\n",
        right.replace("@@ ", "@ "),
        right.replace("\n+\n", "\n\n"),
    ):
        text = json.dumps({"input": wrong}, ensure_ascii=False, separators=(",", ":"))
        assert not takes(quoted, text)


def test_terminals_of_larks_own_library_are_what_the_library_imports() -> None:
    draw = random.Random(1)
    for name in TERMINALS:
        grammar = f"start: X\n%import common.{name} -> X"
        plain, quoted = start(lark(grammar)), start(named_call(custom(grammar)))
        tries = [*texts(grammar, draw, 8), *("".join(draw.choices("+1.eE", k=4)) for _ in range(9))]
        for text in tries:
            written = json.dumps({"input": text}, ensure_ascii=False, separators=(",", ":"))
            assert takes(quoted, written) is takes(plain, text), (name, text)


@pytest.mark.parametrize("grammar", [*GRAMMARS, PATCH])
def test_tokens_over_the_ends_of_strings_are_allowed_where_their_bytes_are(grammar: str) -> None:
    draw = random.Random(2)
    tools = [custom(grammar), custom('start: "x"', "other")]
    matcher = start(required_calls(tools, max_calls=2), BACKEND)
    for _ in range(60):
        found = allowed(matcher)
        for each in range(EOS + 2, len(TABLE.tokens)):
            taken = 0
            for byte in TABLE.tokens[each]:
                if not matcher.accept(byte):
                    break
                taken += 1
            matcher.rollback(taken)
            # of a text that must come, the longest tokens alone are allowed
            fits = taken == len(TABLE.tokens[each])
            assert (each in found) is (fits and (len(found) > 1 or each in found))
        if not matcher.accept(draw.choice([each for each in found if each != EOS] or found)):
            break


def test_calls_of_functions_and_of_custom_tools_stand_in_one_list() -> None:
    now = ToolSchema(name="now", parameters={"type": "object", "properties": {"a": {"$ref": "#"}}})
    only = start(required_calls([custom('start: "x"')], max_calls=1))
    assert takes(only, '[{"name":"patch","parameters":{"input":"x"}}]')
    tools = [custom('start: "x\\n"'), now, custom("start: /[0-9]/\n%ignore / /", "number")]
    matcher = start(required_calls(tools, max_calls=2))

    def calls(*named: tuple[str, object]) -> str:
        given = [{"name": name, "parameters": each} for name, each in named]
        return json.dumps(given, separators=(",", ":"))

    patch, number = ("patch", {"input": "x\n"}), ("number", {"input": " 1"})
    rights: list[list[tuple[str, object]]] = [
        [patch],
        [("now", {"a": {}})],
        [number, patch],
        [("now", {}), number],
    ]
    for right in rights:
        assert takes(matcher, calls(*right)), right
    wrongs: list[list[tuple[str, object]]] = [[("patch", {})], [("patch", {"input": "1"})], []]
    wrongs.append([patch] * 3)
    for wrong in wrongs:
        assert not takes(matcher, calls(*wrong)), wrong


def tag(begin: str, end: str, *, has_special: bool) -> Structured:
    inner = '{"name": "patch", "arguments": '
    calls = [{"begin": begin + inner, "schema": custom('start: "x\\n"+').parameters, "end": end}]
    given = {"structures": calls, "triggers": [begin], "has_special_tokens": has_special}
    return Structured(kind="structural_tag", text=json.dumps(given))


@pytest.mark.parametrize(("begin", "end"), [("<call>", "}</call>"), ("<|call|>", "}<|call|>")])
def test_text_is_free_and_the_input_of_a_call_is_not(begin: str, end: str) -> None:
    has_special = begin == "<|call|>"
    structured = tag(begin, end, has_special=has_special)
    matcher = start(structured, BACKEND)
    call = f'{begin}{{"name": "patch", "arguments": '
    assert takes(matcher, 'Any "text".')
    assert takes(matcher, f'Well: {call}{{"input": "x\\n"}}{end} so {call}{{"input":"x\\n"}}{end}')
    assert not takes(matcher, f'Well: {call}{{"input": "y"}}{end}')
    assert not takes(matcher, f'Well: {call}{{"other": "x\\n"}}{end}')
    with pytest.raises(CannotCompile, match="lark" if not has_special else "text only"):
        XGrammarBackend(TABLE).compile(structured)


def test_a_call_in_place_of_an_answer_follows_its_grammar() -> None:
    schema = json.dumps(custom('start: "x"').parameters)
    form = CallForm(begin="<call>patch", schema=schema, end="</call>")
    answer = Structured(kind="regex", text="[0-9]", calls=CallForms(forms=[form]))
    matcher = start(answer)
    assert takes(matcher, "1")
    assert takes(matcher, '<call>patch{"input": "x"}</call>')
    assert not takes(matcher, '<call>patch{"input": "y"}</call>')


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('start: "a" <|call|>', "<|call|>"),
        ("start: @other", "@other"),
        ('start: %json {"type": "object"}', "%json"),
        ('start: T\nT: ~"a"', '~"a"'),
        ('start: "a" }\n{', "bracket"),
        ("start: /a\\bc/", "\\\\b"),
        ("start: /[[:alpha:]]/", "alpha"),
        ("start: /(?x)a b/", "x"),
        ("start: /(?=a)b/", "(?=a"),
        ("start: /\\p{Greek}/", "Greek"),
        ("start: X\n%import common.NOTHING", "NOTHING"),
        ("start: x", "x"),
        ("start: A\nA: /.+/ & /[^a]+/", "&"),
        ("start: x\nx[lazy]: /a+/", "lazy"),
        ("start: /a$b/", "$"),
    ],
)
def test_what_has_no_spelling_is_refused_by_name(grammar: str, reason: str) -> None:
    with pytest.raises(CannotCompile) as caught:
        BACKEND.compile(named_call(custom(grammar)))
    assert reason in caught.value.message


@pytest.mark.parametrize("attribute", ['stop="b"', "max_tokens=3", "temperature=0.5"])
def test_attributes_of_rules_that_would_do_nothing_are_refused(attribute: str) -> None:
    """The engine neither hides what a model wrote, nor counts or samples by rule."""
    grammar = f"start: part\npart[{attribute}]: /a+/"
    for structured in (lark(grammar), named_call(custom(grammar))):
        with pytest.raises(CannotCompile, match=attribute.partition("=")[0]):
            BACKEND.compile(structured)


def test_a_stream_that_moves_is_in_the_same_place_of_its_grammar() -> None:
    structured = named_call(custom(GRAMMARS[1]))
    grammar = BACKEND.load(BACKEND.compile(structured))
    written = [*b'{"input":"ab\\', *b'n"']
    moved_from = Follower(grammar.start(), [], 1.0)
    for count, each in enumerate(written):
        again = BACKEND.load(BACKEND.compile(structured))
        moved_to = Follower.after_output(again, structured, written[:count], 1.0)
        masks = np.zeros((2, num_words(len(TABLE.tokens))), dtype=np.int32)
        for index, follower in enumerate((moved_from, moved_to)):
            follower.fill(masks, index)
        assert (masks[0] == masks[1]).all()
        moved_from.append(each)

"""Python literals become JSON, without being evaluated."""

import ast
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.gateway.parsers.harness import check_chunkings
from tests.unit.gateway.parsers.tool_formats import calls_of, maker


def as_json(literal: str) -> str:
    (call,) = calls_of(check_chunkings(maker("pythonic"), f"[f(x={literal})]", count=10))
    text = call[1]
    found = re.fullmatch(r'\{"x": (.*)\}', text, re.DOTALL)
    assert found
    json.loads(text)
    return found.group(1)


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        ("1", 1),
        ("-1.5e3", -1500.0),
        ("007", 7),
        (".5", 0.5),
        ("True", True),
        ("false", False),
        ("None", None),
        ("null", None),
        ("''", ""),
        ("'it\\'s \"so\"'", 'it\'s "so"'),
        ('"a\\n\\t\\x41\\u00e9\\U0001F600\\q\\\\"', "a\n\tA\u00e9\U0001f600\\q\\"),
        ("'\\ud83d\\ude00'", "\U0001f600"),
        ("'\\ud83d'", "\ufffd"),
        ("'\\UFFFFFFFF'", "\\UFFFFFFFF"),
        ("'a\\\nb'", "ab"),
        ("'raw\nnewline'", "raw\nnewline"),
        ("'''a'b''c'''", "a'b''c"),
        ('"""x"""', "x"),
        ("'True, [None'", "True, [None"),
        ("[1, (2, 3), {'a': [True, None]},]", [1, [2, 3], {"a": [True, None]}]),
        ("{'a': {'b': ()},\n}", {"a": {"b": []}}),
        ("open('x').read()", "open('x').read()"),
        ("__import__('os').system('id')", "__import__('os').system('id')"),
        ("[x for x in y]", "[x for x in y]"),
        ("{1, 2}", "{1, 2}"),
        ("word", "word"),
        ("1 + 1", "1 + 1"),
        ("", ""),
        ("[" * 200 + "]" * 200, json.loads("[" * 200 + "]" * 200)),
    ],
)
def test_a_literal_as_json(literal: str, value: object) -> None:
    assert json.loads(as_json(literal)) == value


def test_deep_nesting_is_text() -> None:
    deep = "[" * 100_000 + "]" * 100_000
    parser = maker("pythonic")()
    events = [*parser.push(f"[f(x={deep})]"), *parser.finish()]
    assert json.loads(calls_of(events)[0][1]) == {"x": deep}


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=100)
@given(value=_VALUES)
def test_literals_written_by_python_are_read(value: object) -> None:
    assert ast.literal_eval(repr(value)) == value
    parser = maker("pythonic")()
    events = [*parser.push(f"[f(x={value!r})]"), *parser.finish()]
    assert json.loads(calls_of(events)[0][1]) == {"x": value}

"""Tool calls in place of a constrained answer: every family may write its own, and nothing else."""

import json

import pytest

from tests.unit.gateway.parsers.tool_formats import TOOLS as FUNCTIONS
from tests.unit.gateway.parsers.tool_formats import WRITERS, Call
from tokenmesh.engine.grammar.follower import Follower
from tokenmesh.engine.grammar.guidance_backend import GuidanceBackend
from tokenmesh.engine.grammar.matcher import CannotCompile
from tokenmesh.engine.grammar.token_table import TokenTable
from tokenmesh.engine.grammar.xgrammar_backend import XGrammarBackend
from tokenmesh.services.gateway.apis.openai.tools import call_forms
from tokenmesh.services.gateway.parsers.registry import TOOLS
from tokenmesh.shared.messages.structured import CallForm, CallForms, Structured

EOS, MARK = 256, 257
TABLE = TokenTable([*(bytes([each]) for each in range(256)), b"", b""], (EOS,), {"<|call|>": MARK})
BACKEND = GuidanceBackend(TABLE)
ANSWER = {
    "type": "object",
    "properties": {"answer": {"type": "integer"}},
    "required": ["answer"],
    "additionalProperties": False,
}
CALLS = (Call("get_weather", {"city": "Paris", "days": 2}), Call("now", {}))


def takes(structured: Structured, text: str) -> bool:
    """Return whether a text with special tokens, and then its end, follows the grammar."""
    matcher = BACKEND.load(BACKEND.compile(structured)).start()
    parts = text.split("<|call|>")
    ids = [*parts[0].encode()]
    for part in parts[1:]:
        ids += [MARK, *part.encode()]
    return all(matcher.accept(each) for each in [*ids, EOS])


def with_calls(calls: CallForms) -> Structured:
    return Structured(kind="json", text=json.dumps(ANSWER), calls=calls)


@pytest.mark.parametrize("family", WRITERS)
def test_a_family_writes_its_calls_or_the_answer(family: str) -> None:
    forms = call_forms(TOOLS[family], FUNCTIONS)
    if family == "openai":
        # Its calls are in channels, before the answer begins.
        assert not forms.forms
        return
    structured = with_calls(forms)
    assert takes(structured, '{"answer": 1}')
    assert takes(structured, WRITERS[family](CALLS[:1])), WRITERS[family](CALLS[:1])
    assert not takes(structured, "It is sunny.")
    assert not takes(structured, '{"answer": "sunny"}')


def test_every_format_says_how_its_calls_begin() -> None:
    without = {name for name, each in TOOLS.items() if not call_forms(each, FUNCTIONS).forms}
    assert without == {"openai"}


def test_special_tokens_are_written_as_tokens() -> None:
    form = CallForm(begin="<|call|>now", schema='{"type":"object"}', end="<|call|>")
    structured = with_calls(CallForms(forms=[form], opening="<|call|><|call|>", closing="."))
    assert takes(structured, "<|call|>now{}<|call|>")
    assert takes(structured, "<|call|><|call|><|call|>now{}<|call|>\n<|call|>now{}<|call|>.")
    assert not takes(structured, "<|call|>then{}<|call|>")
    assert not takes(structured, "<|call|>now{}")


def test_what_begins_a_call_may_go_on_with_any_token() -> None:
    structured = with_calls(CallForms(forms=[CallForm(begin="<|call|>")]))
    assert takes(structured, '<|call|>{"a<|call|>\n</x>"')
    assert not takes(structured, '{"answer": 1}<|call|>')


@pytest.mark.parametrize("kind", ["json", "json_object", "regex", "choice", "grammar"])
def test_calls_go_with_every_kind_of_constraint(kind: str) -> None:
    text = {
        "json": json.dumps(ANSWER),
        "json_object": "",
        "regex": r"\{\}|yes",
        "choice": json.dumps(['{"answer": 1}', "yes"]),
        "grammar": 'root ::= "yes" | "no"',
    }[kind]
    calls = CallForms(forms=[CallForm(begin="<tool>now")])
    structured = Structured(kind=kind, text=text, calls=calls)  # type: ignore[arg-type]
    assert takes(structured, "<tool>now()")
    assert takes(structured, '{"answer": 1}' if "json" in kind else "yes")
    assert not takes(structured, "<to")
    with pytest.raises(CannotCompile, match="calls"):
        XGrammarBackend(TABLE).compile(structured)


@pytest.mark.parametrize("may_call", [True, False])
def test_a_model_that_calls_before_its_answer_may_end(may_call: bool) -> None:
    """Harmony's calls, and calls within reasoning, stand before where the constraint begins."""
    grammar = BACKEND.load(BACKEND.compile(Structured(kind="json", text=json.dumps(ANSWER))))
    follower = Follower(grammar.start(), [[MARK]], 1.0, [EOS], may_call=may_call)
    assert follower.has_mask is not may_call
    follower.append(MARK)
    assert follower.has_mask

"""GuidanceBackend: llguidance compiles in a millisecond and works its masks out as it goes."""

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

import llguidance
from llguidance import LLMatcher, LLTokenizer

from tokenmesh.engine.api.structured import Structured
from tokenmesh.engine.grammar.call_grammar import CallGrammar
from tokenmesh.engine.grammar.exact_regex import guidance_regex
from tokenmesh.engine.grammar.lark_schema import (
    SPACE_RULE,
    has_lark,
    read_schema,
    schema_rules,
)
from tokenmesh.engine.grammar.matcher import CannotCompile, GrammarFailed, Masks
from tokenmesh.engine.grammar.quoted_lark import check_lark
from tokenmesh.engine.grammar.token_table import TokenTable

_BYTES_A_GRAMMAR: Final = 64 * 1024
"""A grammar's states are made while it is followed; the library does not report their size."""
_MAX_REASON: Final = 500


class GuidanceBackend:
    def __init__(self, tokens: TokenTable, *, has_slices: bool = True) -> None:
        """has_slices: hold parts of the vocabulary apart, which makes masks of JSON strings faster
        and takes more than twice the memory."""
        self._eos_ids = frozenset(tokens.eos_ids)
        self._calls = CallGrammar(tokens)
        own = _Tokenizer(tokens)
        wrapper = llguidance.TokenizerWrapper(own)
        self._tokenizer = LLTokenizer(
            wrapper,
            n_vocab=len(tokens.tokens),
            eos_token=list(tokens.eos_ids),
            slices=None if has_slices else [],
        )
        # the library has its own copy, in a tree
        own.tokens = wrapper.tokens = ()
        own.tokenize = self._tokenizer.greedy_tokenize

    def compile(self, structured: Structured) -> bytes:
        try:
            text = self._text(structured)
            if structured.calls is not None and structured.calls.forms:
                text = self._calls.with_calls(text, structured.calls)
        except (ValueError, KeyError, TypeError, AssertionError) as error:
            raise CannotCompile(str(error)[:_MAX_REASON]) from error
        self._match(text)
        return text.encode()

    def load(self, data: bytes) -> "GuidanceGrammar":
        return GuidanceGrammar(self._match(data.decode()), len(data), self._eos_ids)

    def _text(self, structured: Structured) -> str:
        if structured.kind == "structural_tag":
            tag = json.loads(structured.text)
            if tag.get("has_special_tokens"):
                return self._calls.in_text(tag["structures"], *tag["triggers"])
        return _grammar_text(structured)

    def _match(self, text: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, text, log_level=0)
        if matcher.is_error():
            raise CannotCompile(_reason(matcher.get_error()))
        return matcher


class GuidanceGrammar:
    def __init__(self, beginning: LLMatcher, num_bytes: int, eos_ids: frozenset[int]) -> None:
        self._beginning = beginning
        self._eos_ids = eos_ids
        self.num_bytes = num_bytes + _BYTES_A_GRAMMAR

    def start(self) -> "GuidanceMatcher":
        return GuidanceMatcher(self._beginning.deep_copy(), self._eos_ids)


class GuidanceMatcher:
    """Implements `Matcher`. The library's own never hears of an end-of-sequence token."""

    def __init__(self, matcher: LLMatcher, eos_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._eos_ids = eos_ids
        self._has_ended = False

    def fill(self, masks: Masks, index: int) -> None:
        row = masks[index]
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._matcher.is_error():
            raise GrammarFailed(_first_line(self._matcher.get_error()))

    def accept(self, token_id: int) -> bool:
        if self._has_ended:
            return False
        if token_id in self._eos_ids:
            self._has_ended = self._matcher.is_accepting()
            return self._has_ended
        if self._matcher.try_consume_tokens([token_id]) == 1:
            return True
        if self._matcher.is_error():
            # a limit of the library's, such as on the rules that may apply at a place
            raise GrammarFailed(_first_line(self._matcher.get_error()))
        return False

    def rollback(self, num_tokens: int) -> None:
        if num_tokens and self._has_ended:
            self._has_ended = False
            num_tokens -= 1
        if num_tokens:
            self._matcher.rollback(num_tokens)

    def is_terminated(self) -> bool:
        return self._has_ended


class _Tokenizer:
    """The tokenizer interface of llguidance.

    It tokenizes what a grammar forces: the longest token each time, whose bytes are exactly those.
    A byte that no token begins with ends it: what comes before is forced all the same.
    """

    bos_token_id = None

    def __init__(self, tokens: TokenTable) -> None:
        self.eos_token_id = tokens.eos_ids[0]
        # an empty token would be taken for one that may always come
        self.tokens: Sequence[bytes] = [
            piece or b"\xff<%d>" % token_id for token_id, piece in enumerate(tokens.tokens)
        ]
        self.special_token_ids = tokens.special_ids
        self.tokenize: Callable[[str], list[int]] = lambda _text: []
        """Set once the library has read the tokens."""

    def __call__(self, text: bytes) -> list[int]:
        return self.tokenize(text.decode())


def _grammar_text(structured: Structured) -> str:
    text = structured.text
    match structured.kind:
        case "json":
            schema = read_schema(text)
            if has_lark(schema):
                return _lark_text(schema, structured.any_whitespace)
            return LLMatcher.grammar_from_json_schema(
                schema if structured.additional_properties else _closed(schema),
                overrides=_json_options(structured),
            )
        case "json_object":
            return LLMatcher.grammar_from_json_schema(
                {"type": "object"}, overrides=_json_options(structured)
            )
        case "structural_tag":
            return _structural_tag(json.loads(text))
        case "regex":
            return llguidance.grammar_from("regex", guidance_regex(text))
        case "grammar":
            check_lark(text)
            return llguidance.grammar_from("grammar", text)
        case _:
            return llguidance.grammar_from(structured.kind, text)


def _lark_text(schema: Any, any_whitespace: bool) -> str:
    rules = schema_rules("value", schema, any_whitespace=any_whitespace)
    return "\n".join(["start: value", SPACE_RULE, *rules])


def _json_options(structured: Structured) -> Any:
    options: dict[str, object] = {"whitespace_flexible": structured.any_whitespace}
    if structured.whitespace_pattern is not None:
        options["whitespace_pattern"] = guidance_regex(structured.whitespace_pattern)
    return options


def _closed(schema: Any) -> Any:
    """The schema with objects that take only the properties they list."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if "properties" in schema or "patternProperties" in schema:
        closed.setdefault("additionalProperties", False)
    return closed


def _structural_tag(tag: dict[str, Any]) -> str:
    if "structures" not in tag:
        raise CannotCompile("it takes a structural tag of structures and triggers only")
    triggers = tag["triggers"]
    tags = [
        llguidance.StructTag(
            trigger=next(each for each in triggers if one["begin"].startswith(each)),
            begin=one["begin"],
            grammar=_tag_grammar(json.dumps(one["schema"])),
            end=one["end"],
        )
        for one in tag["structures"]
    ]
    return llguidance.StructTag.to_grammar(tags, assume_special=False)


def _tag_grammar(text: str) -> Any:
    schema = read_schema(text)
    return _lark_text(schema, any_whitespace=True) if has_lark(schema) else schema


def _first_line(error: str) -> str:
    return error.partition("\n")[0][:_MAX_REASON]


def _reason(error: str) -> str:
    """All lines of a compiler's error: the first one often says no more than that there is one."""
    lines = (line.strip() for line in error.splitlines())
    return " ".join(line for line in lines if line)[:_MAX_REASON]

"""XGrammarBackend: masks are worked out when a grammar is compiled; a step costs microseconds."""

import json
import re
from contextlib import suppress
from typing import Any, Final

import xgrammar

from tokenmesh.engine.api.structured import Structured
from tokenmesh.engine.grammar.exact_regex import xgrammar_regex
from tokenmesh.engine.grammar.exact_schema import (
    inexact_keyword,
    is_long,
    without_unknown_formats,
)
from tokenmesh.engine.grammar.faster_ebnf import faster_ebnf
from tokenmesh.engine.grammar.matcher import CannotCompile, Masks
from tokenmesh.engine.grammar.token_table import TokenTable

_SOURCE_LINE: Final = re.compile(r"^\[[\d:]+\] \S+:\d+: ")
"""It holds what the library puts before its messages."""


class XGrammarBackend:
    def __init__(self, tokens: TokenTable) -> None:
        self._eos_ids = frozenset(tokens.eos_ids)
        self._info = xgrammar.TokenizerInfo(
            tokens.tokens,
            xgrammar.VocabType.RAW,
            vocab_size=len(tokens.tokens),
            stop_token_ids=list(tokens.eos_ids),
        )

    def compile(self, structured: Structured) -> bytes:
        compiler = xgrammar.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)
        try:
            return _compile(compiler, structured).serialize_json().encode()
        # its errors have no common base class
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise CannotCompile(_SOURCE_LINE.sub("", str(error)).strip()) from error

    def load(self, data: bytes) -> "XGrammar":
        compiled = xgrammar.CompiledGrammar.deserialize_json(data.decode(), self._info)
        return XGrammar(compiled, self._eos_ids)


class XGrammar:
    def __init__(self, compiled: xgrammar.CompiledGrammar, eos_ids: frozenset[int]) -> None:
        self._compiled = compiled
        self._eos_ids = eos_ids

    @property
    def num_bytes(self) -> int:
        return self._compiled.memory_size_bytes

    def start(self) -> "XGrammarMatcher":
        return XGrammarMatcher(self._compiled)


class XGrammarMatcher:
    def __init__(self, compiled: xgrammar.CompiledGrammar) -> None:
        self._matcher = xgrammar.GrammarMatcher(compiled)

    def fill(self, masks: Masks, index: int) -> None:
        self._matcher.fill_next_token_bitmask(masks, index)

    def accept(self, token_id: int) -> bool:
        return not self._matcher.is_terminated() and self._matcher.accept_token(token_id)

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            self._matcher.rollback(num_tokens)

    def is_terminated(self) -> bool:
        return self._matcher.is_terminated()


def _compile(
    compiler: xgrammar.GrammarCompiler, structured: Structured
) -> xgrammar.CompiledGrammar:
    text = structured.text
    if structured.calls is not None and structured.calls.forms:
        raise CannotCompile("it takes no calls in place of the answer")
    match structured.kind:
        case "json" | "json_object":
            return _compile_json(compiler, structured)
        case "regex":
            return compiler.compile_regex(xgrammar_regex(text))
        case "choice":
            given = json.loads(text)
            if is_long(given):
                raise CannotCompile("it takes no choice of so many characters")
            choices = " | ".join(_literal(each) for each in given)
            return compiler.compile_grammar(f"root ::= {choices}")
        case "grammar":
            if "::=" not in text:
                raise CannotCompile("it takes EBNF, which has rules with ::=")
            return _compile_ebnf(compiler, text)
        case "structural_tag":
            return _compile_tag(compiler, json.loads(text))


def _literal(text: str) -> str:
    r"""A string of EBNF: characters as they are, for \u reaches only to U+FFFF there."""
    return json.dumps(text, ensure_ascii=False)


def _compile_ebnf(compiler: xgrammar.GrammarCompiler, text: str) -> xgrammar.CompiledGrammar:
    faster = faster_ebnf(text)
    if faster is not None:
        with suppress(RuntimeError, ValueError):
            return compiler.compile_grammar(faster)
    return compiler.compile_grammar(text)


def _compile_json(
    compiler: xgrammar.GrammarCompiler, structured: Structured
) -> xgrammar.CompiledGrammar:
    if structured.whitespace_pattern is not None:
        raise CannotCompile("it takes no whitespace pattern")
    schema: Any = (
        {"type": "object"} if structured.kind == "json_object" else json.loads(structured.text)
    )
    return compiler.compile_json_schema(
        json.dumps(_exact_schema(schema)),
        any_whitespace=structured.any_whitespace,
        strict_mode=True,
    )


def _exact_schema(schema: Any) -> Any:
    """A copy without annotations of its formats. Raises CannotCompile for what it ignores."""
    schema = without_unknown_formats(schema)
    keyword = inexact_keyword(schema)
    if keyword is not None:
        raise CannotCompile(f"it does not follow {keyword} to the letter")
    return schema


def _check_parts(value: Any) -> None:
    """Check the schemas and the expressions in the formats of a tag, and make them the library's.

    What stands under `json_schema` is a schema whatever the format does with it.
    """
    if isinstance(value, list):
        for each in value:
            _check_parts(each)
    if not isinstance(value, dict):
        return
    pattern = value.get("pattern")
    if value.get("type") == "regex" and isinstance(pattern, str):
        value["pattern"] = xgrammar_regex(pattern)
    for key, each in value.items():
        if key == "json_schema":
            value[key] = _exact_schema(each)
        else:
            _check_parts(each)


def _compile_tag(
    compiler: xgrammar.GrammarCompiler, tag: dict[str, Any]
) -> xgrammar.CompiledGrammar:
    """In either form: with a `format`, or with the older `structures` and `triggers`."""
    if "structures" not in tag:
        _check_parts(tag)
        return compiler.compile_structural_tag(tag)
    if tag.get("has_special_tokens"):
        raise CannotCompile("it takes calls whose marks are text only")
    items = [
        xgrammar.StructuralTagItem(
            begin=one["begin"], schema=json.dumps(_exact_schema(one["schema"])), end=one["end"]
        )
        for one in tag["structures"]
    ]
    return compiler.compile_structural_tag(items, tag["triggers"])

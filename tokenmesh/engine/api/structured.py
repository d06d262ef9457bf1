"""Structured: a grammar that what a model writes must follow."""

from typing import Literal

import msgspec

StructuredKind = Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag"]


class CallForm(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The form of a call of one function; special tokens are written by their names."""

    begin: str
    schema: str | None = None
    """JSON schema of the arguments; None: the rest of the answer is free."""
    end: str = ""


class CallForms(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Calls that an answer may consist of, one or more."""

    forms: list[CallForm] = []
    """Empty: the model writes calls before the place where the constraint begins."""
    opening: str = ""
    """May stand once before all calls."""
    closing: str = ""
    """May stand once after all calls."""


class Structured(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One constraint. The gateway has bounded its size; the worker compiles it, or refuses."""

    kind: StructuredKind
    text: str = ""
    """json: a JSON schema; json_object: nothing; regex: the expression; choice: a JSON list of
    strings; grammar: EBNF; structural_tag: its JSON."""
    any_whitespace: bool = True
    """json kinds: whether whitespace is free between tokens, or there is none that is needless."""
    whitespace_pattern: str | None = None
    """json kinds: a regular expression of what may stand between tokens instead."""
    additional_properties: bool = True
    """json: default of `additionalProperties`."""
    after: list[list[int]] = []
    """Token sequences that end reasoning: the constraint holds after the first one that is
    generated. Empty: from the first token on. Its writer knows whether the prompt is
    past reasoning already."""
    calls: CallForms | None = None
    """Calls that the model may write in place of the constrained text: it chooses."""
    field: str = "structured_outputs"
    """The client's own name for it, for refusals."""

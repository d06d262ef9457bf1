"""Structured: a grammar that what a model writes must follow."""

from typing import Literal

import msgspec

StructuredKind = Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag"]


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
    field: str = "structured_outputs"
    """The client's own name for it, for refusals."""

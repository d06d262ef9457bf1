"""Static limits of constraints: sizes, nesting and references are checked before compiling.

Regular expressions are not fully parsed here: the worker's grammar library reports their errors.
"""

import json
import re
from typing import Any, Final
from urllib.parse import unquote

from tokenmesh.shared.config.requests import StructuredLimits
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.json_schema import schema_nodes
from tokenmesh.shared.messages.structured import Structured
from tokenmesh.shared.text.surrogates import spells_half_of_a_pair

_COUNT: Final = re.compile(r"\{(\d*+)(,?+)(\d*+)\}", re.ASCII)
"""Possessive quantifiers: digits without a closing brace are scanned once."""
_DIGITS: Final = 9
"""A count with more digits exceeds every limit."""
_MOST: Final = 10**18
"""Products are cut here, so that the work does not grow with their digits."""


def check_regex(pattern: str, limits: StructuredLimits) -> None:
    """Raise ValueError for an expression that exceeds a limit."""
    if len(pattern) > limits.max_regex_chars:
        raise ValueError(
            f"{len(pattern)} characters, at most {limits.max_regex_chars} (gateway.max_regex_chars)"
        )
    scan = _Scan(pattern)
    if scan.depth > limits.max_regex_depth:
        raise ValueError(f"its groups are {scan.depth} deep, at most {limits.max_regex_depth}")
    if scan.repetitions > limits.max_regex_repetitions:
        raise ValueError(
            f"its repetitions multiply to {scan.repetitions}, at most "
            f"{limits.max_regex_repetitions}"
        )


class _Scan:
    """One pass over an expression."""

    def __init__(self, pattern: str) -> None:
        self.depth = 0
        self._open = [1]
        """The highest number of repetitions in each open group."""
        self._last = 1
        """The repetitions of the element that a following count repeats."""
        position = 0
        while position < len(pattern):
            position += self._scan(pattern, position)
        self.repetitions = max(self._open)

    def _scan(self, pattern: str, position: int) -> int:
        """Scan one element; the number of its characters."""
        char = pattern[position]
        if char == "(":
            self._open.append(1)
            self.depth = max(self.depth, len(self._open) - 1)
        elif char == ")" and len(self._open) > 1:
            self._last = self._open.pop()
            self._record(self._last)
        elif char == "[":
            self._last = 1
            return _class_length(pattern, position)
        elif char == "{" and (count := _COUNT.match(pattern, position)):
            # A count multiplies the counts inside the element before it.
            self._last = min(self._last * _largest(count), _MOST)
            self._record(self._last)
            return count.end() - position
        elif char == "\\":
            self._last = 1
            return _escape_length(pattern, position)
        elif char not in "*+?":
            self._last = 1
        return 1

    def _record(self, repetitions: int) -> None:
        self._open[-1] = max(self._open[-1], repetitions)


def _largest(count: re.Match[str]) -> int:
    bounds = [each[: _DIGITS + 1] for each in (count[1], count[3]) if each]
    return max((int(each) for each in bounds), default=1)


def _escape_length(pattern: str, position: int) -> int:
    """xgrammar ignores a backslash at the end."""
    if position + 1 == len(pattern):
        raise ValueError("it ends with a backslash that escapes nothing")
    return 2


def _class_length(pattern: str, start: int) -> int:
    position = start + 1
    while position < len(pattern) and pattern[position] != "]":
        position += _escape_length(pattern, position) if pattern[position] == "\\" else 1
    return position + 1 - start


_SHOWN_PATTERN: Final = 40
_SHOWN_REFERENCE: Final = 60


def check_structured(structured: Structured, limits: StructuredLimits) -> None:
    """Raises InvalidInput that names the constraint's field."""
    try:
        _check(structured, limits)
    except ValueError as error:
        raise InvalidInput(f"{structured.field}: {error}", param=structured.field) from error
    forms = () if structured.calls is None else structured.calls.forms
    num_chars = 0
    for form in forms:
        text = form.schema or ""
        num_chars += len(form.begin) + len(text) + len(form.end)
        try:
            if num_chars > limits.max_grammar_bytes:
                bound = f"{limits.max_grammar_bytes} characters (gateway.max_grammar_bytes)"
                raise ValueError(f"the schemas of calls have more than {bound}")
            if text:
                _check_schema(_parse(text), limits)
        except ValueError as error:
            raise InvalidInput(f"tools: {error}", param="tools") from error


def _check(structured: Structured, limits: StructuredLimits) -> None:
    text = structured.text
    if structured.whitespace_pattern is not None:
        check_regex(structured.whitespace_pattern, limits)
    if structured.kind == "json":
        _check_size(text, "max_schema_bytes", limits)
        _check_schema(_parse(text), limits)
    elif structured.kind == "regex":
        check_regex(text, limits)
    elif structured.kind == "choice":
        _check_size(text, "max_schema_bytes", limits)
        _check_choices(json.loads(text), limits)
    elif structured.kind == "grammar":
        _check_size(text, "max_grammar_bytes", limits)
    elif structured.kind == "structural_tag":
        _check_size(text, "max_grammar_bytes", limits)
        _check_tag(_parse(text), limits)


def _check_schema(schema: dict[str, Any], limits: StructuredLimits) -> None:
    _check_shape(schema, limits)
    _check_references(schema)


def _check_size(text: str, setting: str, limits: StructuredLimits) -> None:
    limit = getattr(limits, setting)
    # Characters first: a text that has too many is not encoded, which copies it.
    num_bytes = len(text) if len(text) > limit else len(text.encode())
    if num_bytes > limit:
        raise ValueError(f"{num_bytes} bytes or more, at most {limit} (gateway.{setting})")


def _parse(text: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON: {error}") from error
    if spells_half_of_a_pair(text, parsed):
        raise ValueError("it holds one half of a surrogate pair")
    if not isinstance(parsed, dict):
        raise ValueError("its JSON must be an object")
    return parsed


def _check_shape(value: object, limits: StructuredLimits) -> None:
    """Check the number and the nesting of a JSON value's parts, and the patterns among them."""
    level, num_nodes, depth = [value], 0, 0
    while level:
        num_nodes += len(level)
        if num_nodes > limits.max_schema_nodes:
            raise ValueError(f"it has more than {limits.max_schema_nodes} parts")
        if depth > limits.max_schema_depth:
            raise ValueError(f"it is nested more than {limits.max_schema_depth} deep")
        depth += 1
        below: list[object] = []
        for each in level:
            if isinstance(each, dict):
                below.extend(each.values())
                _check_pattern(each.get("pattern"), limits)
            elif isinstance(each, list):
                below.extend(each)
        level = below


def _check_pattern(pattern: object, limits: StructuredLimits) -> None:
    if isinstance(pattern, str):
        try:
            check_regex(pattern, limits)
        except ValueError as error:
            raise ValueError(f"pattern {pattern[:_SHOWN_PATTERN]!r}: {error}") from error


def _check_choices(choices: list[str], limits: StructuredLimits) -> None:
    if len(choices) > limits.max_structured_choices:
        raise ValueError(
            f"{len(choices)} choices, at most {limits.max_structured_choices} "
            "(gateway.max_structured_choices)"
        )
    if not all(choices):
        raise ValueError("a choice is empty")


def _check_tag(tag: dict[str, Any], limits: StructuredLimits) -> None:
    """Check a structural tag and the schemas inside it."""
    _check_shape(tag, limits)
    nodes: list[object] = [tag]
    while nodes:
        node = nodes.pop()
        if isinstance(node, list):
            nodes.extend(node)
        elif isinstance(node, dict):
            for key, value in node.items():
                is_schema = key in ("json_schema", "schema") and isinstance(value, dict)
                _check_references(value) if is_schema else nodes.append(value)


def _check_references(schema: dict[str, Any]) -> None:
    """Raise ValueError for a reference without a target, and for an infinitely nested value."""
    for node in schema_nodes(schema):
        if isinstance(node.get("$ref"), str):
            _resolve(schema, node["$ref"])
    _check_finite(schema)


def _resolve(schema: dict[str, Any], reference: str) -> Any:
    """The target of a reference; `#` is the schema itself."""
    if reference != "#" and not reference.startswith("#/"):
        raise ValueError(
            f"$ref {reference[:_SHOWN_REFERENCE]!r} leads outside: "
            "only #/... within the schema is followed"
        )
    node: Any = schema
    for part in reference.split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and key.isdigit() and int(key) < len(node):
            node = node[int(key)]
        elif isinstance(node, dict) and key in node:
            node = node[key]
        else:
            raise ValueError(f"$ref {reference[:_SHOWN_REFERENCE]!r} matches nothing in the schema")
    return node


def _check_finite(schema: dict[str, Any]) -> None:
    """Walk depth first over what each value must contain; a cycle would never end."""
    is_done: dict[int, bool] = {}
    stack: list[tuple[Any, bool]] = [(schema, False)]
    while stack:
        node, is_left = stack.pop()
        if is_left:
            is_done[id(node)] = True
            continue
        state = is_done.get(id(node))
        if state is False:
            raise ValueError("$ref: the schema requires values that are nested without end")
        if state or not isinstance(node, dict):
            continue
        is_done[id(node)] = False
        stack.append((node, True))
        stack.extend((each, False) for each in _required(schema, node))


def _required(schema: dict[str, Any], node: dict[str, Any]) -> list[Any]:
    """Schemas that every value of `node` satisfies itself or in one of its parts."""
    if isinstance(node.get("$ref"), str):
        return [_resolve(schema, node["$ref"])]
    held = list(_as_list(node.get("allOf")))
    for name in ("anyOf", "oneOf"):
        branches = _as_list(node.get(name))
        held += branches if len(branches) == 1 else []
    kind = node.get("type")
    properties = node.get("properties")
    if kind == "object" and isinstance(properties, dict):
        required = _as_list(node.get("required"))
        held += [properties[name] for name in required if _is_key(name, properties)]
    if kind == "array" and isinstance(node.get("minItems"), int) and node["minItems"] > 0:
        held += [node["items"]] if "items" in node else []
    return held


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_key(name: object, properties: dict[str, Any]) -> bool:
    return isinstance(name, str) and name in properties

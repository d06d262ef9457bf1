"""JSON schemas with strings that follow Lark grammars: `{"type": "string", "lark": "..."}`.

llguidance has no such keyword. The objects, lists and choices around such a string become rules,
and the string a grammar within the rules; every other schema stays one.
"""

import json
from typing import Any, Final

from tokenmesh.engine.grammar.exact_regex import with_guidance_patterns
from tokenmesh.engine.grammar.exact_schema import without_unknown_formats
from tokenmesh.engine.grammar.matcher import CannotCompile
from tokenmesh.engine.grammar.quoted_lark import quoted_lark
from tokenmesh.shared.json_schema import LARK, schema_nodes

SPACE_RULE: Final = r"SPACE: /[ \t\r\n]{1,8}/"
_OBJECT: Final = frozenset(("type", "properties", "required", "additionalProperties", "$defs"))
_ARRAY: Final = frozenset(("type", "items", "minItems", "maxItems", "$defs"))


def read_schema(text: str) -> Any:
    """A schema of plain JSON as llguidance takes it. Raises CannotCompile."""
    return with_guidance_patterns(without_unknown_formats(json.loads(text)))


def has_lark(schema: Any) -> bool:
    """Return whether a string within follows a grammar."""
    return any(LARK in node for node in schema_nodes(schema))


def schema_rules(name: str, schema: Any, *, any_whitespace: bool = True) -> list[str]:
    """Rules of Lark, the first one called `name`; with whitespace `SPACE_RULE` belongs to them.

    Raises CannotCompile for a string with a grammar where this cannot follow it.
    """
    definitions = schema.get("$defs") if isinstance(schema, dict) else None
    return _Writer(definitions, any_whitespace).rules(name, schema)


class _Writer:
    def __init__(self, definitions: Any, any_whitespace: bool) -> None:
        self._definitions = definitions
        self._any_whitespace = any_whitespace
        self._space = " SPACE? " if any_whitespace else " "

    def rules(self, name: str, schema: Any) -> list[str]:
        if not has_lark(schema):
            return [f"{name}: %json {self._plain(schema)}"]
        if isinstance(schema.get(LARK), str) and schema.keys() <= {"type", LARK}:
            text = quoted_lark(schema[LARK])
            return [rf'{name}: "\"" {name}-text "\""', f"{name}-text: %lark {{\n{text}\n}}"]
        if schema.get("type") == "object" and schema.keys() <= _OBJECT:
            return self._object(name, schema)
        if schema.get("type") == "array" and schema.keys() <= _ARRAY:
            return self._array(name, schema)
        if schema.keys() <= {"anyOf", "$defs"}:
            return self._choice(name, schema["anyOf"])
        raise CannotCompile(f"with {', '.join(schema)} a string cannot follow a Lark grammar")

    def _plain(self, schema: Any) -> str:
        if isinstance(schema, dict) and self._definitions is not None:
            schema = {"$defs": self._definitions, **schema}
        if isinstance(schema, dict) and not self._any_whitespace:
            schema = {**schema, "x-guidance": {"whitespace_flexible": False}}
        return json.dumps(schema)

    def _object(self, name: str, schema: dict[str, Any]) -> list[str]:
        properties = schema["properties"]
        is_closed = schema.get("additionalProperties") is False
        if not is_closed or set(schema.get("required", ())) != properties.keys():
            raise CannotCompile(
                "an object around a string with a Lark grammar requires all of its properties and "
                "takes no others"
            )
        parts, rules = [], []
        for number, (key, each) in enumerate(properties.items()):
            written = json.dumps(json.dumps(key, ensure_ascii=False), ensure_ascii=False)
            parts.append(f'{written}{self._space}":"{self._space}{name}-{number}')
            rules += self.rules(f"{name}-{number}", each)
        inner = f'{self._space}","{self._space}'.join(parts)
        return [f'{name}: "{{"{self._space}{inner}{self._space}"}}"', *rules]

    def _array(self, name: str, schema: dict[str, Any]) -> list[str]:
        least, most = schema.get("minItems", 0), schema.get("maxItems", "")
        if least < 1:
            raise CannotCompile("a list of strings with a Lark grammar has one item or more")
        space = self._space
        more = f'(","{space}{name}-item{space}){{{least - 1},{most - 1 if most else ""}}}'
        first = f'{name}: "["{space}{name}-item{space}{"" if most == 1 else more} "]"'
        return [first, *self.rules(f"{name}-item", schema["items"])]

    def _choice(self, name: str, schemas: list[Any]) -> list[str]:
        """Its parts are written alike: llguidance's own schemas divide their text otherwise."""
        if self._any_whitespace:
            raise CannotCompile("strings with a Lark grammar are no part of a choice")
        names = [f"{name}-{number}" for number in range(len(schemas))]
        rules = [f"{name}: {' | '.join(names)}"]
        for each, schema in zip(names, schemas, strict=True):
            rules += self._object(each, schema)
        return rules

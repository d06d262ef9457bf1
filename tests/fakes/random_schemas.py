"""Random JSON schemas of the kinds that clients send, the same for the same seed."""

from random import Random
from typing import Any

Schema = dict[str, Any]

NAMES = ("a", "b", "name", "value", "x y", 'q"uote', "na\u00efve", "back\\slash", "", "$id2", "1")
STRINGS = ("red", "green", "", 'a "b"', "\u4f60\u597d", "line\nbreak", "x" * 20)
PATTERNS = ("^[a-c]+$", "^\\d{2,4}$", "x[0-9]?y", "^(on|off)$")
RARE: tuple[Schema, ...] = (
    {"multipleOf": 3},
    {"uniqueItems": True},
    {"not": {"const": 1}},
    {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    {"allOf": [{"minimum": 3}, {"maxLength": 3}]},
    {"minProperties": 2},
    {"maxProperties": 1},
    {"contains": {"type": "integer"}},
    {"patternProperties": {"^a": {"type": "null"}}},
    {"propertyNames": {"maxLength": 2}},
    {"dependentRequired": {"a": ["b"]}},
    {"if": {"type": "string"}, "then": {"minLength": 2}},
)
"""Keywords that most clients never send: to be followed, or refused."""
FORMATS = ("date", "uuid", "ipv4")


def random_schema(seed: int) -> Schema:
    """A schema, at times with definitions, and at times with one that holds itself."""
    rng = Random(seed)
    maker = _Maker(rng)
    schema = maker.schema(depth=rng.randint(1, 4))
    if maker.uses_definitions:
        schema = {"$defs": maker.definitions(), **schema}
    if rng.random() < 0.1:
        schema = {**schema, **rng.choice(RARE)}
    return schema


class _Maker:
    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self.uses_definitions = False

    def schema(self, depth: int) -> Schema:
        rng = self._rng
        leaves = (self._string, self._integer, self._number, self._enum, self._simple)
        branches = (self._object, self._object, self._array, self._union, self._reference)
        if depth == 0:
            return rng.choice(leaves)()
        return (
            rng.choice((*branches, rng.choice(leaves)))(depth)
            if rng.random() < 0.8
            else (rng.choice(leaves)())
        )

    def definitions(self) -> Schema:
        properties = {"value": {"type": "integer"}, "next": {"$ref": "#/$defs/list"}}
        return {"list": {"type": "object", "properties": properties}, "leaf": self._enum()}

    def _object(self, depth: int) -> Schema:
        rng = self._rng
        names = rng.sample(NAMES, rng.randint(0, 4))
        schema: Schema = {"type": "object"}
        if names or rng.random() < 0.5:
            schema["properties"] = {name: self.schema(depth - 1) for name in names}
            schema["required"] = [name for name in names if rng.random() < 0.6]
        more = rng.random()
        if more < 0.4:
            schema["additionalProperties"] = False
        elif more < 0.5:
            schema["additionalProperties"] = self.schema(0)
        return schema

    def _array(self, depth: int) -> Schema:
        rng = self._rng
        schema: Schema = {"type": "array", "items": self.schema(depth - 1)}
        if rng.random() < 0.5:
            schema["minItems"] = rng.randint(0, 2)
        if rng.random() < 0.5:
            schema["maxItems"] = rng.randint(2, 4)
        if rng.random() < 0.1:
            schema["prefixItems"] = [self.schema(0), self.schema(0)]
        return schema

    def _union(self, depth: int) -> Schema:
        return {"anyOf": [self.schema(depth - 1) for _ in range(self._rng.randint(1, 3))]}

    def _reference(self, depth: int) -> Schema:
        self.uses_definitions = True
        return {"$ref": f"#/$defs/{self._rng.choice(('list', 'leaf'))}"}

    def _string(self, _depth: int = 0) -> Schema:
        rng = self._rng
        schema: Schema = {"type": "string"}
        kind = rng.random()
        if kind < 0.3:
            schema["maxLength"] = rng.randint(2, 8)
            schema["minLength"] = rng.randint(0, 2)
        elif kind < 0.45:
            schema["pattern"] = rng.choice(PATTERNS)
        elif kind < 0.55:
            schema["format"] = rng.choice(FORMATS)
        return schema

    def _integer(self, _depth: int = 0) -> Schema:
        rng = self._rng
        schema: Schema = {"type": "integer"}
        if rng.random() < 0.5:
            schema["minimum"] = rng.randint(-1000, 50)
        if rng.random() < 0.5:
            schema["maximum"] = rng.randint(60, 100_000)
        return schema

    def _number(self, _depth: int = 0) -> Schema:
        schema: Schema = {"type": "number"}
        if self._rng.random() < 0.3:
            schema["minimum"] = self._rng.choice((-1.5, 0, 10))
        if self._rng.random() < 0.3:
            schema["exclusiveMaximum"] = self._rng.choice((20, 99.25))
        return schema

    def _enum(self, _depth: int = 0) -> Schema:
        rng = self._rng
        values: list[Any] = [*rng.sample(STRINGS, 2), rng.randint(-5, 5), None, 1.5, [1], {"k": 2}]
        if rng.random() < 0.3:
            return {"const": rng.choice(values)}
        if rng.random() < 0.4:
            return {"type": "string", "enum": list(rng.sample(STRINGS, 3))}
        return {"enum": rng.sample(values, rng.randint(1, 4))}

    def _simple(self, _depth: int = 0) -> Schema:
        rng = self._rng
        if rng.random() < 0.3:
            return {"type": rng.sample(("string", "null", "boolean", "integer"), 2)}
        return {"type": rng.choice(("boolean", "null")), "description": "d", "default": None}

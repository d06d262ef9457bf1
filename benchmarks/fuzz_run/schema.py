"""Bodies that fit a schema of the OpenAPI document."""

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, Final

Json = Any

_MAX_DEPTH: Final = 6
"""Below it only what is required is made."""
_WORDS: Final = ("a", "rivers and stones", "27 + 45", "\u00e9t\u00e9", "", "\U0001f600", "x" * 300)
_OPTIONAL_SHARE: Final = 0.25
_LOWEST: Final = ("minimum", "exclusiveMinimum")
_HIGHEST: Final = ("maximum", "exclusiveMaximum")


@dataclass(frozen=True, slots=True)
class Operation:
    """One way to ask for something with a body."""

    method: str
    path: str
    content_type: str
    schema: Json


HIDDEN: Final = tuple(
    Operation("GET", path, "", {})
    for path in (
        "/",
        "/console",
        "/console/events",
        "/console/{name}",
        "/docs",
        "/docs/{name}",
        "/openapi.json",
        "/redoc",
    )
)
"""Routes that an OpenAPI document leaves out."""


def operations(document: Mapping[str, Json]) -> list[Operation]:
    """Every operation of an OpenAPI document, one for each content type of its body."""
    found = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            contents = operation.get("requestBody", {}).get("content") or {"": {}}
            for content_type, content in contents.items():
                schema = content.get("schema", {})
                found.append(Operation(method.upper(), path, content_type, schema))
    return found


class BodyMaker:
    """Makes random values of schemas; `fixed` are values of properties by name."""

    def __init__(
        self, document: Mapping[str, Json], random: Random, fixed: Mapping[str, Json]
    ) -> None:
        self._definitions = document.get("components", {}).get("schemas", {})
        self._random = random
        self.fixed = fixed

    def make(self, schema: Json, depth: int = 0) -> Json:
        """A value that fits, as far as types, names, enumerations and bounds go."""
        if not isinstance(schema, dict):
            return None
        if "$ref" in schema:
            return self.make(self._definitions[schema["$ref"].rpartition("/")[2]], depth)
        for key in ("anyOf", "oneOf"):
            if key in schema:
                return self.make(self._random.choice(schema[key]), depth)
        if "allOf" in schema:
            merged: dict[str, Json] = {}
            for each in schema["allOf"]:
                value = self.make(each, depth)
                merged |= value if isinstance(value, dict) else {}
            return merged
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self._random.choice(schema["enum"])
        return self._of_type(schema, depth)

    def _of_type(self, schema: dict[str, Json], depth: int) -> Json:
        random, kind = self._random, schema.get("type")
        if kind == "object" or "properties" in schema:
            return self._object(schema, depth)
        if kind == "array":
            most = 0 if depth > _MAX_DEPTH else min(schema.get("maxItems", 3), 3)
            count = max(random.randint(0, most), min(schema.get("minItems", 0), 3))
            return [self.make(schema.get("items", {}), depth + 1) for _ in range(count)]
        if kind in ("integer", "number"):
            return self._number(schema, is_whole=kind == "integer")
        if kind == "boolean":
            return random.random() < 0.5
        if kind == "null":
            return None
        return random.choice(_WORDS)[: schema.get("maxLength")]

    def _object(self, schema: dict[str, Json], depth: int) -> Json:
        required = schema.get("required", ())
        value = {}
        for name, each in schema.get("properties", {}).items():
            if depth == 0 and name in self.fixed:
                value[name] = self.fixed[name]
            elif name in required or (
                depth <= _MAX_DEPTH and self._random.random() < _OPTIONAL_SHARE
            ):
                value[name] = self.make(each, depth + 1)
        return value

    def _number(self, schema: dict[str, Json], *, is_whole: bool) -> Json:
        low = next((float(schema[key]) for key in _LOWEST if key in schema), 0.0)
        high = next((float(schema[key]) for key in _HIGHEST if key in schema), low + 16)
        if is_whole:
            return self._random.randint(int(low), max(int(low), min(int(high), int(low) + 64)))
        return self._random.uniform(low, high)

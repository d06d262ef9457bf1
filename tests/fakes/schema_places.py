"""Every place of a JSON schema at which a client writes text, and a value that has text there."""

from collections.abc import Iterator
from typing import Any, Final

Schema = dict[str, Any]
_DEPTH: Final = 7
"""The depth of values within values; deeper ones are the same schemas again."""


class Places:
    """The schemas of one document, and how to fill them."""

    def __init__(self, components: dict[str, Schema], texts: dict[str, Any] | None = None) -> None:
        """`texts`: what stands in fields of these names where they are not the place."""
        self._components = components
        self._texts = texts or {}

    def filled(self, schema: Schema, text: str) -> Iterator[tuple[str, Any]]:
        """The name of each place, and a value with `text` there that is valid otherwise."""
        seen: set[str] = set()
        for name, value in self._filled(schema, text, "", ()):
            if name not in seen:
                seen.add(name)
                yield name, value

    def example(self, schema: Schema, depth: int = _DEPTH) -> Any:
        """A small value of a schema."""
        schema = self._resolved(schema)
        for key in ("const", "default"):
            if schema.get(key) is not None:
                return schema[key]
        if "enum" in schema:
            return schema["enum"][0]
        if variants := _variants(schema):
            return self.example(variants[0], depth - 1)
        kind = _kind(schema)
        if kind == "object":
            return self._object(schema, depth, {})
        if kind == "array":
            return [self.example(schema.get("items") or {}, depth - 1)] if depth else []
        numbers = {"integer": int(schema.get("minimum", 1)), "number": schema.get("minimum", 1)}
        return {**numbers, "boolean": False, "null": None}.get(str(kind), "x")

    def _object(self, schema: Schema, depth: int, given: dict[str, Any]) -> dict[str, Any]:
        fields = schema.get("properties", {})
        wanted = {*schema.get("required", ()), *(self._texts.keys() & fields.keys())}
        found = {
            name: self._texts[name]
            if name in self._texts
            else self.example(fields[name], depth - 1)
            if depth
            else None
            for name in sorted(wanted & fields.keys())
        }
        return {**found, **given}

    def _filled(
        self, schema: Schema, text: str, place: str, parents: tuple[str, ...]
    ) -> Iterator[tuple[str, Any]]:
        name = schema.get("$ref", "").rsplit("/", 1)[-1]
        if len(parents) > _DEPTH or (name and parents.count(name) > 1):
            return
        parents = (*parents, name)
        schema = self._resolved(schema)
        if variants := _variants(schema):
            for each in variants:
                yield from self._filled(each, text, place, parents)
            return
        kind = _kind(schema)
        if kind == "object":
            yield from self._in_object(schema, text, place, parents)
        elif kind == "array":
            # a tuple has `prefixItems`, and no further ones
            of_item = schema.get("items") or (schema.get("prefixItems") or [{}])[0]
            for inner, item in self._filled(of_item, text, f"{place}[]", parents):
                yield inner, [item]
        elif kind in ("string", None) and "const" not in schema:
            yield place, text

    def _in_object(
        self, schema: Schema, text: str, place: str, parents: tuple[str, ...]
    ) -> Iterator[tuple[str, Any]]:
        for name, field in schema.get("properties", {}).items():
            inner = f"{place}.{name}" if place else name
            for each, value in self._filled(field, text, inner, parents):
                yield each, self._object(schema, _DEPTH, {name: value})
        others = schema.get("additionalProperties", False)
        if others:
            free = others if isinstance(others, dict) else {}
            yield f"{place}{{}}", self._object(schema, _DEPTH, {text: self.example(free)})
            for each, value in self._filled(free, text, f"{place}.*", parents):
                yield each, self._object(schema, _DEPTH, {"other": value})

    def _resolved(self, schema: Schema) -> Schema:
        while "$ref" in schema:
            schema = self._components[schema["$ref"].rsplit("/", 1)[-1]]
        if "allOf" not in schema:
            return schema
        parts = [self._resolved(each) for each in schema["allOf"]]
        if len(parts) == 1:
            return parts[0]
        fields = {name: each for part in parts for name, each in part.get("properties", {}).items()}
        required = [name for part in parts for name in part.get("required", ())]
        return {"type": "object", "properties": fields, "required": required}


def _variants(schema: Schema) -> list[Schema]:
    found = schema.get("anyOf") or schema.get("oneOf") or []
    return [each for each in found if each.get("type") != "null"]


def _kind(schema: Schema) -> str | None:
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = next((each for each in kind if each != "null"), None)
    return "object" if kind is None and "properties" in schema else kind

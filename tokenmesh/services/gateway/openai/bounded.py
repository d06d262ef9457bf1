"""Bounded: models of what clients send, with a bound on the errors that pydantic makes.

It makes one for each wrong element in each branch of a union, at a kilobyte each. Here a list ends
with its first wrong element, and objects of any number of entries are read in portions.
"""

from itertools import islice
from typing import Any, Final

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

_LISTS: Final = frozenset(("list", "set", "frozenset", "tuple"))
_PORTION: Final = 32
"""Entries of an object that are validated at once; as many errors may be made of it."""
_MAX_FIELDS: Final = 128
"""Of an object whose unknown fields are errors."""
_SURE: Final = (None, {"type": "any"}, {"type": "str"}, {"type": "str", "strict": True})


def _bound(schema: Any, handler: GetCoreSchemaHandler, done: set[int]) -> None:
    """Change a schema and all within, in place."""
    if isinstance(schema, list | tuple):
        for each in schema:
            _bound(each, handler, done)
    if not isinstance(schema, dict) or id(schema) in done:
        return
    done.add(id(schema))
    kind = schema.get("type")
    if kind == "definition-ref":
        _bound(handler.resolve_ref_schema(schema), handler, done)
        return
    for key, value in tuple(schema.items()):
        # A field may be called "metadata", too; what pydantic keeps under it is not a schema.
        if key != "metadata" or not isinstance(kind, str):
            _bound(value, handler, done)
    if not isinstance(kind, str):
        return
    if kind in _LISTS:
        schema["fail_fast"] = True
    elif kind == "dict" and not _cannot_fail(schema):
        _wrap(schema, _in_portions)
    elif kind == "model" and schema.get("config", {}).get("extra_fields_behavior") == "forbid":
        _wrap(schema, _few_fields)


def _wrap(schema: dict[str, Any], function: Any) -> None:
    inner = {key: value for key, value in schema.items() if key not in ("ref", "metadata")}
    kept = {key: schema[key] for key in ("ref", "metadata") if key in schema}
    outer = core_schema.no_info_wrap_validator_function(function, inner)
    schema.clear()
    schema.update({key: value for key, value in outer.items() if value is not None}, **kept)


def _cannot_fail(schema: dict[str, Any]) -> bool:
    """Keys of JSON are strings."""
    return schema.get("keys_schema") in _SURE and schema.get("values_schema") in _SURE[:2]


def _in_portions(given: object, validator: core_schema.ValidatorFunctionWrapHandler) -> object:
    if not isinstance(given, dict) or len(given) <= _PORTION:
        return validator(given)
    entries = iter(given.items())
    read: dict[Any, Any] = {}
    while portion := dict(islice(entries, _PORTION)):
        read.update(validator(portion))
    return read


def _few_fields(given: object, validator: core_schema.ValidatorFunctionWrapHandler) -> object:
    if isinstance(given, dict) and len(given) > _MAX_FIELDS:
        raise ValueError(f"it has {len(given)} fields")
    return validator(given)


class Bounded(BaseModel):
    """The base of all that clients send."""

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[BaseModel], handler: GetCoreSchemaHandler, /
    ) -> CoreSchema:
        """See pydantic."""
        schema = handler(source)
        _bound(schema, handler, set())
        return schema

"""Base model and field types for what clients send.

The types accept what clients mean: null for a default, 8.0 for the whole number 8, numbers and
booleans as text. Generated clients send every field, the unset ones as null; JSON has one kind of
number, and some languages write a point into all of them. Token ids in lists must be numbers.

The base model bounds the errors that pydantic makes: one for each wrong element in each branch of a
union, about a kilobyte each. Here a list stops at its first wrong element, and the entries of an
object are validated in portions.
"""

import re
from itertools import islice
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, Field, GetCoreSchemaHandler, ValidationInfo
from pydantic_core import CoreSchema, core_schema

INT32_MAX: Final = 2**31 - 1

_LISTS: Final = frozenset(("list", "set", "frozenset", "tuple"))
_PORTION: Final = 32
"""Entries of an object that are validated at once: the most errors that are made for it."""
_MAX_FIELDS: Final = 128
"""For an object whose unknown fields are errors."""
_ALWAYS_VALID: Final = (None, {"type": "any"}, {"type": "str"}, {"type": "str", "strict": True})

_WHOLE_TEXT: Final = re.compile(r"[+-]?[0-9]{1,19}(?:\.0{1,19})?")
_REAL_TEXT: Final = re.compile(
    r"[+-]?(?:[0-9]{1,19}(?:\.[0-9]{0,19})?|\.[0-9]{1,19})(?:[eE][+-]?[0-9]{1,3})?"
)
_FLAG_BY_TEXT: Final = {
    **dict.fromkeys(("true", "1", "yes", "on", "t", "y"), True),
    **dict.fromkeys(("false", "0", "no", "off", "f", "n"), False),
}
"""The same texts as pydantic's own conversion."""
_MAX_TEXT: Final = 64


class Conversions(dict[str, None]):
    """A validation context that collects the names of fields converted from text, in order."""


def _bound(schema: Any, handler: GetCoreSchemaHandler, done: set[int]) -> None:
    """Change a schema and everything inside it, in place."""
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
        # A field may also be named "metadata"; pydantic's own metadata is not a schema.
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
    """Return whether every JSON object is valid: its keys are always strings."""
    is_any_key = schema.get("keys_schema") in _ALWAYS_VALID
    return is_any_key and schema.get("values_schema") in _ALWAYS_VALID[:2]


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
    """The base of all models of clients' input."""

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[BaseModel], handler: GetCoreSchemaHandler, /
    ) -> CoreSchema:
        """The model's schema with its lists and objects bounded."""
        schema = handler(source)
        _bound(schema, handler, set())
        return schema


def default_for_null(kind: Any, default: object) -> BeforeValidator:
    """Read null as `default`. `kind` is the field's type in the OpenAPI document."""

    def fill(given: object) -> object:
        return default if given is None else given

    return BeforeValidator(fill, json_schema_input_type=kind | None)


def _record(info: ValidationInfo) -> None:
    if isinstance(info.context, Conversions):
        info.context[info.field_name or ""] = None


def _whole(given: object, info: ValidationInfo) -> object:
    if isinstance(given, float) and given.is_integer():
        return int(given)
    if isinstance(given, str) and len(given) <= _MAX_TEXT and _WHOLE_TEXT.fullmatch(given.strip()):
        _record(info)
        return int(given.partition(".")[0])
    return given


def _real(given: object, info: ValidationInfo) -> object:
    if isinstance(given, str) and len(given) <= _MAX_TEXT and _REAL_TEXT.fullmatch(given.strip()):
        _record(info)
        return float(given)
    return given


def _flag(given: object, info: ValidationInfo) -> object:
    if not isinstance(given, str) or len(given) > _MAX_TEXT:
        return given
    found = _FLAG_BY_TEXT.get(given.lower())
    if found is None:
        return given
    _record(info)
    return found


Whole: Final = BeforeValidator(_whole)
"""Accepts 8.0 and "8" for 8."""
Real: Final = BeforeValidator(_real)
"""Accepts "0.5" for 0.5."""

TokenId = Annotated[int, Field(ge=0, lt=2**32)]
Positive = Annotated[int, Field(ge=1, le=INT32_MAX), Whole]
NotNegative = Annotated[int, Field(ge=0, le=INT32_MAX), Whole]
MinusOneOrMore = Annotated[int, Field(ge=-1, le=INT32_MAX), Whole]

_Priority = Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX), Whole]
Priority = Annotated[_Priority, default_for_null(_Priority, 0)]
"""A lower number is served first; give the field the default 0."""

Flag = Annotated[bool, BeforeValidator(_flag)]
Off = Annotated[Flag, default_for_null(bool, False)]
"""A flag that is off by default; give the field the default False."""
On = Annotated[Flag, default_for_null(bool, True)]
"""A flag that is on by default; give the field the default True."""

Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
]
"""OpenAI's own limits."""

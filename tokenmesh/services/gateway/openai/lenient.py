"""Field types that accept what clients mean: null, 8.0 for the whole number 8, numbers as text.

Generated clients send every field, the unset ones as null; JSON has one kind of number, and some
languages write all of theirs with a point. Numbers and booleans in strings are accepted as vLLM
accepts them, but for lists of token ids; a validation context of type `Conversions` collects the
names of such fields.
"""

import re
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, ValidationInfo

INT32_MAX: Final = 2**31 - 1


def default_for_null(kind: Any, default: object) -> BeforeValidator:
    """Reads null as `default`. `kind` is the field's type, for the OpenAPI document."""

    def fill(given: object) -> object:
        return default if given is None else given

    return BeforeValidator(fill, json_schema_input_type=kind | None)


class Conversions(dict[str, None]):
    """Names of fields whose value was a string that stands for a number or a boolean, in order."""


_WHOLE_TEXT: Final = re.compile(r"[+-]?[0-9]{1,19}(?:\.0{1,19})?")
_REAL_TEXT: Final = re.compile(
    r"[+-]?(?:[0-9]{1,19}(?:\.[0-9]{0,19})?|\.[0-9]{1,19})(?:[eE][+-]?[0-9]{1,3})?"
)
_FLAG_BY_TEXT: Final = {
    **dict.fromkeys(("true", "1", "yes", "on", "t", "y"), True),
    **dict.fromkeys(("false", "0", "no", "off", "f", "n"), False),
}
"""Pydantic's own words for booleans."""
_MAX_TEXT: Final = 64


def _note(info: ValidationInfo) -> None:
    if isinstance(info.context, Conversions):
        info.context[info.field_name or ""] = None


def _whole(given: object, info: ValidationInfo) -> object:
    if isinstance(given, float) and given.is_integer():
        return int(given)
    if isinstance(given, str) and len(given) <= _MAX_TEXT and _WHOLE_TEXT.fullmatch(given.strip()):
        _note(info)
        return int(given.partition(".")[0])
    return given


def _real(given: object, info: ValidationInfo) -> object:
    if isinstance(given, str) and len(given) <= _MAX_TEXT and _REAL_TEXT.fullmatch(given.strip()):
        _note(info)
        return float(given)
    return given


def _flag(given: object, info: ValidationInfo) -> object:
    if not isinstance(given, str) or len(given) > _MAX_TEXT:
        return given
    found = _FLAG_BY_TEXT.get(given.lower())
    if found is None:
        return given
    _note(info)
    return found


_WHOLE: Final = BeforeValidator(_whole)

_REAL: Final = BeforeValidator(_real)

Temperature = Annotated[float, Field(ge=0, le=100), _REAL]
TopP = Annotated[float, Field(gt=0, le=1), _REAL]
MinP = Annotated[float, Field(ge=0, le=1), _REAL]
Penalty = Annotated[float, Field(ge=-2, le=2), _REAL]
RepetitionPenalty = Annotated[float, Field(gt=0, le=100), _REAL]
LengthPenalty = Annotated[float, Field(ge=-10, le=10), _REAL]
Flag = Annotated[bool, BeforeValidator(_flag)]

Positive = Annotated[int, Field(ge=1, le=INT32_MAX), _WHOLE]
NotNegative = Annotated[int, Field(ge=0, le=INT32_MAX), _WHOLE]
MinusOneOrMore = Annotated[int, Field(ge=-1, le=INT32_MAX), _WHOLE]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63), _WHOLE]

Count = Annotated[NotNegative, default_for_null(NotNegative, 0)]
"""A number of something, 0 by default."""

_Priority = Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX), _WHOLE]
Priority = Annotated[_Priority, default_for_null(_Priority, 0)]
"""Lower goes first; 0 by default."""

Off = Annotated[Flag, default_for_null(bool, False)]
"""A flag that is off by default; give it that default."""
On = Annotated[Flag, default_for_null(bool, True)]
"""A flag that is on by default; give it that default."""

"""Field types that take what clients mean: null for a default, and 8.0 for the whole number 8.

Generated clients send every field, the unset ones as null; JSON has one kind of number, and some
languages write all of theirs with a point. Text is never read as a number or a flag.
"""

from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field

INT32_MAX: Final = 2**31 - 1


def default_for_null(kind: Any, default: object) -> BeforeValidator:
    """Reads null as `default`. `kind` is the field's type, for the OpenAPI document."""

    def fill(given: object) -> object:
        return default if given is None else given

    return BeforeValidator(fill, json_schema_input_type=kind | None)


def _whole(given: object) -> object:
    return int(given) if isinstance(given, float) and given.is_integer() else given


_WHOLE: Final = BeforeValidator(_whole)

Positive = Annotated[int, Field(ge=1, le=INT32_MAX), _WHOLE]
NotNegative = Annotated[int, Field(ge=0, le=INT32_MAX), _WHOLE]
MinusOneOrMore = Annotated[int, Field(ge=-1, le=INT32_MAX), _WHOLE]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63), _WHOLE]

Count = Annotated[NotNegative, default_for_null(NotNegative, 0)]
"""A number of something, 0 by default."""

_Priority = Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX), _WHOLE]
Priority = Annotated[_Priority, default_for_null(_Priority, 0)]
"""Lower goes first; 0 by default."""

Off = Annotated[bool, default_for_null(bool, False)]
"""A flag that is off by default; give it that default."""
On = Annotated[bool, default_for_null(bool, True)]
"""A flag that is on by default; give it that default."""

"""Reading plain JSON objects of a request: each refusal names the place in the client's body."""

from typing import Any

from tokenmesh.shared.errors import InvalidInput


def get_string(holder: dict[str, Any], name: str, place: str, *, is_empty_ok: bool = False) -> str:
    """A string that must be there. Raises InvalidInput."""
    value = get_optional_string(holder, name, place)
    if value is None:
        raise InvalidInput(f"{place}.{name} is missing", param=f"{place}.{name}")
    if not value and not is_empty_ok:
        raise InvalidInput(f"{place}.{name} is empty", param=f"{place}.{name}")
    return value


def get_optional_string(holder: dict[str, Any], name: str, place: str) -> str | None:
    """A string, or None when it is null or not there. Raises InvalidInput."""
    value = holder.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidInput(f"{place}.{name} must be a string", param=f"{place}.{name}")
    return value


def get_objects(holder: dict[str, Any], name: str, place: str) -> list[dict[str, Any]]:
    """A list of objects; empty when it is null or not there. Raises InvalidInput."""
    values = holder.get(name)
    if values is None:
        return []
    if not isinstance(values, list):
        raise InvalidInput(f"{place}.{name} must be a list", param=f"{place}.{name}")
    for index, value in enumerate(values):
        if not isinstance(value, dict):
            where = f"{place}.{name}[{index}]"
            raise InvalidInput(f"{where} must be an object", param=where)
    return values


def one_of(value: object, allowed: tuple[str, ...], place: str) -> str:
    """A word out of several. Raises InvalidInput that lists them."""
    if not isinstance(value, str) or value not in allowed:
        shown = "missing" if value is None else repr(value)[:60]
        raise InvalidInput(f"{place} is {shown}: must be one of {', '.join(allowed)}", param=place)
    return value

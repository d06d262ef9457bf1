"""Reading the fields of JSON objects inside a request, with errors that name their path."""

from typing import Any

from tokenmesh.services.gateway.openai.translation import Json, invalid


def get_string(holder: Json, name: str, path: str, *, is_empty_ok: bool = False) -> str:
    """A required string. Raises InvalidInput."""
    value = get_optional_string(holder, name, path)
    if value is None:
        raise invalid(f"{path}.{name}", "is missing")
    if not value and not is_empty_ok:
        raise invalid(f"{path}.{name}", "is empty")
    return value


def get_optional_string(holder: Json, name: str, path: str) -> str | None:
    """A string, or None if it is null or missing. Raises InvalidInput."""
    value = holder.get(name)
    if value is not None and not isinstance(value, str):
        raise invalid(f"{path}.{name}", "must be a string")
    return value


def get_objects(holder: Json, name: str, path: str) -> list[Json]:
    """A list of objects; empty if it is null or missing. Raises InvalidInput."""
    values: Any = holder.get(name)
    if values is None:
        return []
    if not isinstance(values, list):
        raise invalid(f"{path}.{name}", "must be a list")
    for index, value in enumerate(values):
        if not isinstance(value, dict):
            raise invalid(f"{path}.{name}[{index}]", "must be an object")
    return values


def one_of(value: object, allowed: tuple[str, ...], path: str) -> str:
    """One of several strings. Raises InvalidInput that lists them."""
    if not isinstance(value, str) or value not in allowed:
        shown = "missing" if value is None else repr(value)[:60]
        raise invalid(path, f"is {shown}: must be one of {', '.join(allowed)}")
    return value

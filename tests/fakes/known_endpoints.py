"""Gateways of tests begin sooner: FastAPI analyses each of their endpoints once in a process.

A gateway has about ninety endpoints, each a new function, and analysing them takes more than half
of a start. A thousand tests start one.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from fastapi import routing
from fastapi.dependencies.models import Dependant
from fastapi.dependencies.utils import get_dependant

_known: dict[tuple[object, ...], Dependant] = {}


def _get_dependant(*, path: str, call: Callable[..., Any], **given: Any) -> Dependant:
    """Return what FastAPI finds out about an endpoint, by its code and its parameters."""
    key = (
        path,
        getattr(call, "__code__", call),
        repr(getattr(call, "__annotations__", None)),
        repr((getattr(call, "__defaults__", None), getattr(call, "__kwdefaults__", None))),
        repr(given),
    )
    found = _known.get(key)
    if found is None:
        found = get_dependant(path=path, call=call, **given)
        # functions that it depends on may belong to this gateway
        if not found.dependencies:
            _known[key] = replace(found)
        return found
    return replace(found, call=call, dependencies=[])


def analyse_once() -> None:
    """From now on, for all gateways of this process."""
    cast("Any", routing).get_dependant = _get_dependant

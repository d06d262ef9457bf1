"""Endpoint: the function of a route. Post: one that is called by its path."""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

Endpoint = Callable[[Request], Awaitable[Response]]


class Post(NamedTuple):
    """A route that generates. It is called by its path, without FastAPI's routing.

    This saves about 16 % of a request's CPU time in `benchmarks/bench_gateway.py`. FastAPI has the
    same function and describes it in the OpenAPI document.
    """

    endpoint: Endpoint
    body: type[BaseModel]
    tag: str = "generate"
    """Its section in the OpenAPI document."""

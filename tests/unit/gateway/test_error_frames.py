"""A handled error keeps no part of its request in memory."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from tokenmesh.services.gateway.core.errors import error_response
from tokenmesh.shared.errors import InvalidInput, TokenMeshError


class Held:
    """Stands for a body."""


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def raise_again(error: TokenMeshError, _body: Held) -> None:
    # The frame refers to its own error, whose traceback refers to the frame.
    raise error


def fail(body: Held) -> None:
    error = InvalidInput("inner")
    try:
        raise_again(error, body)
    except InvalidInput as caught:
        raise InvalidInput("outer") from caught


def test_the_body_of_a_refused_request_is_freed_at_once() -> None:
    body = Held()
    freed = weakref.ref(body)
    response = None
    try:
        fail(body)
    except TokenMeshError as error:
        response = error_response(error, {"path": "/v1/completions"})
    assert response is not None
    assert response.status_code == 400
    del body
    assert freed() is None

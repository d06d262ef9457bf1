"""Errors of realtime sessions: every one has a code that OpenAI's clients know."""

from collections.abc import Iterator

import tokenmesh.services.gateway.main  # noqa: F401  (defines every error of a gateway)
from tokenmesh.services.gateway.apis.realtime.errors import CODES, error_view
from tokenmesh.shared.errors import Cancelled, TokenMeshError


def kinds(base: type[TokenMeshError] = TokenMeshError) -> Iterator[type[TokenMeshError]]:
    if base is not Cancelled:  # the client has left
        yield base
    for each in base.__subclasses__():
        yield from kinds(each)


def test_every_error_has_a_code_of_the_table() -> None:
    # Not as parameters: which errors there are, and in which order, depends on what is imported.
    for kind in dict.fromkeys(kinds()):
        view = error_view(kind("no"))
        assert view["code"] in CODES.values(), kind
        is_ours = kind.status >= 500
        assert view["type"] == ("server_error" if is_ours else "invalid_request_error"), kind
        assert (view["code"] == "server_error") == is_ours, kind

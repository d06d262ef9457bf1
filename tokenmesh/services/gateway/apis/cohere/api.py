"""Cohere's API, as the gateway's table of APIs has it."""

from typing import Final

from tokenmesh.services.gateway.apis.cohere import errors
from tokenmesh.services.gateway.core.api import Api, Routes
from tokenmesh.services.gateway.core.gateway_core import Core


def build(_core: Core) -> Routes:
    """Its routes are still among those of all APIs."""
    return Routes()


COHERE: Final = Api(
    name="cohere",
    build=build,
    prefixes=errors.PREFIXES,
    write_error=errors.write_error,
    error_body=errors.CohereError,
)

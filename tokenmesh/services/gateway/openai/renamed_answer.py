"""RenamedAnswer: an Answer whose errors are told in the words of the client's own body."""

from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenmesh.services.gateway.generation.answer import GenerationResponse
from tokenmesh.shared.errors import TokenMeshError


class RenamedAnswer(Response):
    """For APIs whose bodies become a chat's."""

    def __init__(
        self, answer: GenerationResponse, rename: Callable[[TokenMeshError], TokenMeshError]
    ) -> None:
        super().__init__()
        self._answer = answer
        self._rename = rename

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        try:
            await self._answer(scope, receive, send)
        except TokenMeshError as error:
            raise self._rename(error) from error

"""ResponseAnswer: an Answer whose errors name the fields of the client's own body."""

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenmesh.services.gateway.answer import Answer
from tokenmesh.services.gateway.responses.paths import Paths
from tokenmesh.shared.errors import TokenMeshError


class ResponseAnswer(Response):
    """Runs the answer."""

    def __init__(self, answer: Answer, paths: Paths) -> None:
        super().__init__()
        self._answer = answer
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        try:
            await self._answer(scope, receive, send)
        except TokenMeshError as error:
            raise self._paths.rename(error) from error

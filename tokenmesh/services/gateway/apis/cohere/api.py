"""Cohere's Chat API, as the table of APIs has it."""

from typing import Final

from tokenmesh.services.gateway.apis.cohere import errors, routes
from tokenmesh.services.gateway.apis.cohere.request import CohereChatRequest
from tokenmesh.services.gateway.apis.cohere.writer import CohereChat
from tokenmesh.services.gateway.apis.openai.request_builder import RequestBuilder
from tokenmesh.services.gateway.core.api import CHAT_OPERATION, AnswerKind, AnswerShape, Api, Routes
from tokenmesh.services.gateway.core.gateway_core import Core
from tokenmesh.services.gateway.core.http.endpoint import Post


def build(core: Core) -> Routes:
    """The routes, for one gateway."""
    post = Post(routes.cohere_endpoint(core, RequestBuilder(core)), CohereChatRequest)
    return Routes(posts=dict.fromkeys(_PATHS, post))


_PATHS: Final = (routes.CHAT, routes.OWN_CHAT)


COHERE: Final = Api(
    name="cohere",
    build=build,
    prefixes=("/cohere/", routes.OWN_CHAT),
    write_error=errors.write_error,
    error_body=errors.CohereError,
    answer_kinds=dict.fromkeys(_PATHS, AnswerKind("chatcmpl", CHAT_OPERATION)),
    answers={("post", path): AnswerShape([CohereChat], streams=True) for path in _PATHS},
)

"""Anthropic's Messages API, as the table of APIs has it."""

from typing import Final

from tokenmesh.services.gateway.apis.anthropic import errors, routes
from tokenmesh.services.gateway.apis.anthropic.request import CountTokensRequest, MessagesRequest
from tokenmesh.services.gateway.apis.anthropic.writer import MessageBody, TokenCount
from tokenmesh.services.gateway.apis.openai.request_builder import RequestBuilder
from tokenmesh.services.gateway.core.api import CHAT_OPERATION, AnswerKind, AnswerShape, Api, Routes
from tokenmesh.services.gateway.core.gateway_core import Core
from tokenmesh.services.gateway.core.http.endpoint import Post


def build(core: Core) -> Routes:
    """The routes, for one gateway."""
    builder = RequestBuilder(core)
    return Routes(
        posts={routes.PATH: Post(routes.messages_endpoint(core, builder), MessagesRequest)},
        routers=[routes.messages_router(core, builder)],
        bodies=[CountTokensRequest],
    )


ANTHROPIC: Final = Api(
    name="anthropic",
    build=build,
    prefixes=(routes.PATH,),
    write_error=errors.write_error,
    error_body=errors.MessagesErrorBody,
    answer_kinds={routes.PATH: AnswerKind("msg", CHAT_OPERATION)},
    answers={
        ("post", routes.PATH): AnswerShape([MessageBody], streams=True),
        ("post", f"{routes.PATH}/count_tokens"): AnswerShape([TokenCount]),
    },
)

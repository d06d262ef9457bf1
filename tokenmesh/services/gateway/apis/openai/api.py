"""OpenAI's chats, completions and models, and vLLM's tokens, as the table of APIs has them."""

from typing import Final

from tokenmesh.services.gateway.apis.openai import routes, shapes
from tokenmesh.services.gateway.apis.openai.batch_chat import BatchChatRequest
from tokenmesh.services.gateway.apis.openai.not_served import NOT_SERVED
from tokenmesh.services.gateway.apis.openai.request import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from tokenmesh.services.gateway.apis.openai.request_builder import RequestBuilder
from tokenmesh.services.gateway.apis.openai.tokens import tokenize_router, tokenizer_info_router
from tokenmesh.services.gateway.core.api import (
    CHAT_OPERATION,
    COMPLETION_OPERATION,
    AnswerKind,
    AnswerShape,
    Api,
    Routes,
)
from tokenmesh.services.gateway.core.gateway_core import Core
from tokenmesh.services.gateway.core.http.endpoint import Post


def build(core: Core) -> Routes:
    """The routes, for one gateway."""
    builder = RequestBuilder(core)
    routers = [routes.models_router(core), tokenize_router(core)]
    if core.settings.tokenizer_info:
        routers.append(tokenizer_info_router(core))
    return Routes(
        posts={
            routes.CHAT: Post(routes.chat_endpoint(core, builder), ChatRequest),
            routes.BATCH_CHAT: Post(routes.chat_batch_endpoint(core, builder), BatchChatRequest),
            routes.COMPLETIONS: Post(routes.completion_endpoint(core, builder), CompletionRequest),
        },
        routers=routers,
        bodies=[TokenizeRequest, DetokenizeRequest],
    )


OPENAI: Final = Api(
    name="openai",
    build=build,
    answer_kinds={
        routes.CHAT: AnswerKind("chatcmpl", CHAT_OPERATION),
        routes.BATCH_CHAT: AnswerKind("chatcmpl", CHAT_OPERATION),
        routes.COMPLETIONS: AnswerKind("cmpl", COMPLETION_OPERATION),
    },
    exempt={"GET": ("/v1/models", "/v1/models/.+")},
    hints=NOT_SERVED,
    answers={
        ("post", routes.CHAT): AnswerShape([shapes.ChatCompletion], streams=True),
        ("post", routes.BATCH_CHAT): AnswerShape([shapes.ChatCompletion]),
        ("post", routes.COMPLETIONS): AnswerShape([shapes.Completion], streams=True),
        ("get", "/v1/models"): AnswerShape([shapes.ModelList]),
        ("get", "/v1/models/{model_id}"): AnswerShape([shapes.Model]),
        ("post", "/tokenize"): AnswerShape([shapes.TokenizeResult]),
        ("post", "/detokenize"): AnswerShape([shapes.DetokenizeResult]),
    },
)

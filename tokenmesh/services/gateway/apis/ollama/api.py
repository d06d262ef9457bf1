"""Ollama's API, as the gateway's table of APIs has it."""

from typing import Final

from tokenmesh.services.gateway.apis.ollama.errors import OllamaError, write_error
from tokenmesh.services.gateway.apis.ollama.request import OllamaShowRequest
from tokenmesh.services.gateway.apis.ollama.routes import (
    CHAT,
    EMBED,
    EMBEDDINGS,
    GENERATE,
    LISTS,
    PREFIX,
    models_router,
    posts,
)
from tokenmesh.services.gateway.apis.ollama.writer import OllamaEmbedding, OllamaEmbeddings
from tokenmesh.services.gateway.core.api import (
    CHAT_OPERATION,
    COMPLETION_OPERATION,
    EMBEDDING_OPERATION,
    AnswerKind,
    AnswerShape,
    Api,
    Routes,
)
from tokenmesh.services.gateway.core.gateway_core import Core


def build(core: Core) -> Routes:
    """The routes, for one gateway."""
    return Routes(posts=posts(core), routers=[models_router(core)], bodies=[OllamaShowRequest])


OLLAMA: Final = Api(
    name="ollama",
    build=build,
    prefixes=(PREFIX,),
    write_error=write_error,
    error_body=OllamaError,
    answer_kinds={
        CHAT: AnswerKind("chatcmpl", CHAT_OPERATION),
        GENERATE: AnswerKind("cmpl", COMPLETION_OPERATION),
        EMBED: AnswerKind("embd", EMBEDDING_OPERATION),
        EMBEDDINGS: AnswerKind("embd", EMBEDDING_OPERATION),
    },
    exempt={"GET": LISTS},
    answers={
        ("post", EMBED): AnswerShape([OllamaEmbeddings]),
        ("post", EMBEDDINGS): AnswerShape([OllamaEmbedding]),
    },
)

"""Frontends and engines of other gateways: render, derender, generate, as the table has them."""

from typing import Final

from tokenmesh.services.gateway.apis.scale_out import routes, shapes
from tokenmesh.services.gateway.apis.scale_out.scale_out import ScaleOut
from tokenmesh.services.gateway.core.api import (
    CHAT_OPERATION,
    COMPLETION_OPERATION,
    AnswerKind,
    AnswerShape,
    Api,
    Routes,
)
from tokenmesh.services.gateway.core.gateway_core import Core


def build(core: Core) -> Routes:
    """The routes, for one gateway."""
    scale_out = ScaleOut(core)
    return Routes(
        routers=[routes.scale_out_router(core, scale_out)],
        bodies=list(routes.BODIES.values()) if scale_out.is_enabled else (),
        background=[scale_out],
    )


_RENDERED: Final = AnswerShape([shapes.RenderedRequest])


SCALE_OUT: Final = Api(
    name="scale_out",
    build=build,
    answer_kinds={
        routes.RENDER_CHAT: AnswerKind("chatcmpl", CHAT_OPERATION),
        routes.RENDER_COMPLETION: AnswerKind("cmpl", COMPLETION_OPERATION),
        routes.RENDER_MESSAGES: AnswerKind("msg", CHAT_OPERATION),
        routes.RENDER_COHERE: AnswerKind("chatcmpl", CHAT_OPERATION),
        routes.RENDER_RESPONSES: AnswerKind("resp", CHAT_OPERATION),
        routes.GENERATE: AnswerKind("generate-tokens", COMPLETION_OPERATION),
    },
    exempt={"POST": (routes.ABORT,)},
    answers={
        ("post", routes.RENDER_CHAT): _RENDERED,
        ("post", routes.RENDER_MESSAGES): _RENDERED,
        ("post", routes.RENDER_COHERE): _RENDERED,
        ("post", routes.RENDER_RESPONSES): _RENDERED,
        ("post", routes.RENDER_COMPLETION): AnswerShape([shapes.RenderedRequest], is_list=True),
        ("post", routes.DERENDER_CHAT): AnswerShape(
            [shapes.DerenderedChat, shapes.DerenderedChunk]
        ),
        ("post", routes.DERENDER_COMPLETION): AnswerShape(
            [shapes.DerenderedCompletion, shapes.DerenderedChunk]
        ),
        ("post", routes.GENERATE): AnswerShape([shapes.GenerateResponse], streams=True),
        ("post", routes.ABORT): AnswerShape(is_empty=True),
    },
)

"""OpenAI's Responses and Conversations, as the table of APIs has them."""

from typing import Final

from tokenmesh.services.gateway.apis.responses import routes, shapes
from tokenmesh.services.gateway.apis.responses.request import ResponsesRequest
from tokenmesh.services.gateway.apis.responses.response_logs import open_journal
from tokenmesh.services.gateway.apis.responses.service import JOURNAL, Responses
from tokenmesh.services.gateway.core.api import CHAT_OPERATION, AnswerKind, AnswerShape, Api, Routes
from tokenmesh.services.gateway.core.gateway_core import Core
from tokenmesh.services.gateway.core.http.endpoint import Post


def build(core: Core) -> Routes:
    """The routes, for one gateway."""
    responses = Responses(core)
    return Routes(
        posts={routes.PATH: Post(routes.response_endpoint(core, responses), ResponsesRequest)},
        routers=[
            routes.input_tokens_router(core, responses),
            routes.stored_responses_router(core, responses),
            routes.conversations_router(core, responses),
        ],
        bodies=routes.CONVERSATION_BODIES,
        background=[responses],
    )


RESPONSES: Final = Api(
    name=JOURNAL,
    open_journal=lambda bus, settings: open_journal(bus, settings.responses),
    build=build,
    answer_kinds={routes.PATH: AnswerKind("resp", CHAT_OPERATION)},
    exempt={
        "GET": (f"{routes.PATH}/[^/]+", f"{routes.PATH}/[^/]+/input_items"),
        "DELETE": (f"{routes.PATH}/[^/]+",),
        # Cancelling frees capacity for the tenant's other requests.
        "POST": (f"{routes.PATH}/[^/]+/cancel",),
    },
    answers={
        ("post", routes.PATH): AnswerShape([shapes.Response], streams=True),
        ("post", f"{routes.PATH}/input_tokens"): AnswerShape([shapes.InputTokens]),
        ("get", f"{routes.PATH}/{{response_id}}"): AnswerShape([shapes.Response], streams=True),
        ("delete", f"{routes.PATH}/{{response_id}}"): AnswerShape([shapes.ResponseDeleted]),
        ("post", f"{routes.PATH}/{{response_id}}/cancel"): AnswerShape([shapes.Response]),
        ("get", f"{routes.PATH}/{{response_id}}/input_items"): AnswerShape([shapes.InputItems]),
    },
)

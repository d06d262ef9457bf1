"""OpenAI's Realtime API, a websocket, as the table of APIs has it."""

from typing import Final

from tokenmesh.services.gateway.apis.audio.service import Transcriptions
from tokenmesh.services.gateway.apis.openai.request_builder import RequestBuilder
from tokenmesh.services.gateway.apis.realtime.routes import realtime_router
from tokenmesh.services.gateway.apis.realtime.services import RealtimeServices
from tokenmesh.services.gateway.core.api import Api, Routes
from tokenmesh.services.gateway.core.gateway_core import Core


def build(core: Core) -> Routes:
    """The routes, for one gateway."""
    builder = RequestBuilder(core)
    transcriptions = Transcriptions(builder, core.mesh.calls, core.generation)
    return Routes(routers=[realtime_router(RealtimeServices(core, builder, transcriptions))])


REALTIME: Final = Api(
    name="realtime",
    build=build,
)

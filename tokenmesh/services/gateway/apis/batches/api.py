"""OpenAI's Batches, as the table of APIs has them."""

from typing import Final

from tokenmesh.services.gateway.apis.batches.logs import open_batch_journal
from tokenmesh.services.gateway.apis.batches.records import BatchList, BatchObject
from tokenmesh.services.gateway.apis.batches.routes import PATH, BatchRequest, batches_router
from tokenmesh.services.gateway.apis.batches.service import JOURNAL, BatchRunner, BatchService
from tokenmesh.services.gateway.core.api import AnswerShape, Api, Routes
from tokenmesh.services.gateway.core.gateway_core import Core


def build(core: Core) -> Routes:
    """The routes, for one gateway."""
    service = BatchService(core)
    return Routes(
        routers=[batches_router(core, service)],
        bodies=[BatchRequest],
        background=[BatchRunner(service, core)],
    )


BATCHES: Final = Api(
    name=JOURNAL,
    open_journal=open_batch_journal,
    build=build,
    exempt={
        # Their creation has been counted, and clients poll them.
        "GET": (f"{PATH}/[^/]+",),
        "POST": (f"{PATH}/[^/]+/cancel",),
    },
    answers={
        ("post", PATH): AnswerShape([BatchObject]),
        ("get", PATH): AnswerShape([BatchList]),
        ("get", f"{PATH}/{{batch_id}}"): AnswerShape([BatchObject]),
        ("post", f"{PATH}/{{batch_id}}/cancel"): AnswerShape([BatchObject]),
    },
)

"""The interface of SageMaker's containers, as the table of APIs has it."""

from typing import Final

from tokenmesh.services.gateway.apis.sagemaker.routes import sagemaker_router
from tokenmesh.services.gateway.core.api import Api, Routes
from tokenmesh.services.gateway.core.gateway_core import Core


def build(core: Core) -> Routes:
    """The routes, for one gateway."""
    return Routes(routers=[sagemaker_router(core)])


SAGEMAKER: Final = Api(
    name="sagemaker",
    build=build,
    exempt={"GET": ("/ping",)},
)

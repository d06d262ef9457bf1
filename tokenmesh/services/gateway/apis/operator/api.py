"""Define what operators ask of a gateway, as the table of APIs has it."""

from typing import Final

from tokenmesh.services.gateway.apis.operator import admin, routes
from tokenmesh.services.gateway.apis.operator.mesh_metrics import MeshMetrics
from tokenmesh.services.gateway.apis.operator.spans import SpanFeed
from tokenmesh.services.gateway.core.api import AnswerShape, Api, Routes
from tokenmesh.services.gateway.core.gateway_core import Core
from tokenmesh.services.gateway.core.tenancy.usage import UsageReader, usage_router


def build(core: Core) -> Routes:
    """The routes, for one gateway."""
    spans = SpanFeed(core)
    usage = UsageReader(core.redis, core.tenancy.keys, core.tenancy.admission)
    routers = [
        usage_router(usage),
        routes.health_router(core, MeshMetrics(core)),
        routes.mesh_router(core),
        routes.traces_router(spans.store),
        routes.console_router(core, spans.store),
    ]
    if core.settings.docs:
        routers.append(routes.docs_router(core))
    if core.settings.admin_routes:
        routers += [admin.admin_router(core), admin.adapters_router(core)]
    return Routes(
        routers=routers,
        bodies=admin.BODIES if core.settings.admin_routes else (),
        background=[spans],
    )


OPERATOR: Final = Api(
    name="operator",
    build=build,
    exempt={
        "GET": (
            *("/health", "/livez", "/readyz", "/load", "/version", "/metrics", "/mesh"),
            *("/server_info", "/is_sleeping", "/traces", "/traces/[^/]+"),
            *("/v1/usage", "/v1/usage/[^/]+"),
            *("/console", "/console/[^/]+", "/docs", "/docs/[^/]+", "/redoc"),
            r"/openapi\.json",
        ),
        "POST": (
            *("/mesh/[^/]+/drain", "/sleep", "/wake_up", "/start_profile", "/stop_profile"),
            *(admin.LOAD, admin.UNLOAD, admin.ADAPTERS),
        ),
        "DELETE": (f"{admin.ADAPTERS}/.+",),
    },
    answers={
        ("get", "/livez"): AnswerShape(is_empty=True),
        ("get", "/metrics"): AnswerShape(media_type="text/plain"),
    },
)

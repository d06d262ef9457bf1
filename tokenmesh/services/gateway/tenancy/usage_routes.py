"""GET /v1/usage and /v1/usage/tenants."""

import re
from typing import Annotated, Final

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from tokenmesh.services.gateway.context import context_of
from tokenmesh.services.gateway.errors import json_response
from tokenmesh.services.gateway.gateway import Gateway
from tokenmesh.services.gateway.tenancy.month import month_of
from tokenmesh.services.gateway.tenancy.usage_shapes import UsageList
from tokenmesh.shared.clock import wall_s
from tokenmesh.shared.errors import Forbidden, InvalidInput

_MONTH: Final = re.compile(r"[0-9]{4}-(0[1-9]|1[0-2])")
# only described: what does not fit is refused below, in our own words
_AS_DESCRIBED: Final = {"anyOf": [{"type": "string", "pattern": f"^{_MONTH.pattern}$"}]}
Month = Annotated[str | None, Query(json_schema_extra=_AS_DESCRIBED)]


def usage_router(gateway: Gateway) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["usage"])

    @router.get("/v1/usage")
    async def read_usage(request: Request, month: Month = None) -> Response:
        """What the tenant of the key has used in a month (such as 2026-11; the current one)."""
        tenant = context_of(request.scope).access.tenant
        return json_response(await gateway.usage.one(tenant, _checked(month)))

    @router.get("/v1/usage/tenants")
    async def list_usage(request: Request, month: Month = None) -> Response:
        """What each tenant has used; for keys that are an admin's."""
        if not context_of(request.scope).access.is_admin:
            raise Forbidden("the usage of all tenants is for admin keys")
        return json_response(UsageList(data=await gateway.usage.all(_checked(month))))

    return router


def _checked(month: str | None) -> str:
    if month is None:
        return month_of(wall_s())
    if not _MONTH.fullmatch(month):
        raise InvalidInput("month is written as in 2026-11", param="month")
    return month

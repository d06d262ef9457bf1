"""GET /v1/usage and /v1/usage/tenants: what tenants have used in a month, read from Redis."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Annotated, Final

import msgspec
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from tokenmesh.services.gateway.core.context import access_of
from tokenmesh.services.gateway.core.http.sse import json_response
from tokenmesh.services.gateway.core.tenancy.admission import Admission
from tokenmesh.services.gateway.core.tenancy.auth import KeyRing
from tokenmesh.services.gateway.core.tenancy.ledger import TokenCounts, month_of
from tokenmesh.services.gateway.core.tenancy.redis_state import usage_key
from tokenmesh.services.gateway.core.tenancy.tenant import Tenant
from tokenmesh.shared.clock import wall_s
from tokenmesh.shared.errors import Forbidden, InvalidInput, Unavailable
from tokenmesh.shared.redis import Redis, Reply

_KINDS: Final = frozenset(each.name for each in fields(TokenCounts))
_MONTH: Final = re.compile(r"[0-9]{4}-(0[1-9]|1[0-2])")
# Only for the OpenAPI document: `_checked` refuses a wrong month with our error format.
_MONTH_SCHEMA: Final = {"anyOf": [{"type": "string", "pattern": f"^{_MONTH.pattern}$"}]}
Month = Annotated[str | None, Query(json_schema_extra=_MONTH_SCHEMA)]


class ModelUsage(msgspec.Struct, kw_only=True):
    model: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    image_tokens: int = 0
    """It is a part of the prompt tokens, as the next two."""
    audio_tokens: int = 0
    video_tokens: int = 0


class TenantUsage(msgspec.Struct, kw_only=True):
    """One tenant in one month; None: it has no budget."""

    tenant: str
    month: str
    total_tokens: int
    monthly_tokens: int | None
    tokens_left: int | None
    models: list[ModelUsage]
    object: str = "usage"


class UsageList(msgspec.Struct, kw_only=True):
    data: list[TenantUsage]
    object: str = "list"


@dataclass(slots=True)
class UsageReader:
    """Reads the usage of tenants from Redis."""

    redis: Redis | None
    keys: KeyRing
    admission: Admission

    async def all(self, month: str) -> list[TenantUsage]:
        """The usage of every tenant, by name. Raises Unavailable."""
        tenants = self.keys.tenants
        return await self._read([tenants[name] for name in sorted(tenants)], month)

    async def one(self, tenant: Tenant, month: str) -> TenantUsage:
        """The usage of a tenant. Raises Unavailable."""
        return (await self._read([tenant], month))[0]

    async def _read(self, tenants: list[Tenant], month: str) -> list[TenantUsage]:
        if self.redis is None:
            raise Unavailable("usage is stored in Redis, and this gateway runs without Redis")
        await self.admission.settle()
        commands = [("HGETALL", usage_key(tenant.name, month)) for tenant in tenants]
        replies = await self.redis.call_all(commands)
        pairs = zip(tenants, replies, strict=True)
        return [_usage(tenant, month, _counts(reply)) for tenant, reply in pairs]


def _counts(reply: Reply) -> dict[str, int]:
    """Fields that are not counts are ignored."""
    flat = reply if isinstance(reply, list) else []
    pairs = zip(flat[::2], flat[1::2], strict=False)
    return {
        name.decode("utf-8", "replace"): int(value)
        for name, value in pairs
        if isinstance(name, bytes) and isinstance(value, bytes) and value.isdigit()
    }


def _usage(tenant: Tenant, month: str, counts: dict[str, int]) -> TenantUsage:
    used, budget = counts.get("tokens", 0), tenant.monthly_tokens
    return TenantUsage(
        tenant=tenant.name,
        month=month,
        total_tokens=used,
        monthly_tokens=budget,
        tokens_left=None if budget is None else max(0, budget - used),
        models=list(_models(counts)),
    )


def _models(counts: dict[str, int]) -> Iterable[ModelUsage]:
    tokens: dict[str, TokenCounts] = {}
    for field, count in counts.items():
        kind, _, model = field.partition(":")
        if model and kind in _KINDS:
            setattr(tokens.setdefault(model, TokenCounts()), kind, count)
    for model, found in sorted(tokens.items()):
        yield ModelUsage(
            model=model,
            requests=found.requests,
            prompt_tokens=found.prompt,
            cached_tokens=found.cached,
            completion_tokens=found.completion,
            image_tokens=found.image,
            audio_tokens=found.audio,
            video_tokens=found.video,
        )


def usage_router(usage: UsageReader) -> APIRouter:
    """The routes of usage."""
    router = APIRouter(tags=["usage"])

    @router.get("/v1/usage")
    async def read_usage(request: Request, month: Month = None) -> Response:
        """Return what the tenant of the key has used in a month (such as 2026-11; the current
        one).
        """
        tenant = access_of(request).tenant
        return json_response(await usage.one(tenant, _checked(month)))

    @router.get("/v1/usage/tenants")
    async def list_usage(request: Request, month: Month = None) -> Response:
        """Return what each tenant has used; for admin keys."""
        if not access_of(request).is_admin:
            raise Forbidden("the usage of all tenants requires an admin key")
        return json_response(UsageList(data=await usage.all(_checked(month))))

    return router


def _checked(month: str | None) -> str:
    if month is None:
        return month_of(wall_s())
    if not _MONTH.fullmatch(month):
        raise InvalidInput("month must be written as in 2026-11", param="month")
    return month

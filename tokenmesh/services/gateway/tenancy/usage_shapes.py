"""The bodies of /v1/usage."""

import msgspec


class ModelUsage(msgspec.Struct, kw_only=True):
    """Of one model."""

    model: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class TenantUsage(msgspec.Struct, kw_only=True):
    """Of one tenant in one month; None: there is no budget."""

    tenant: str
    month: str
    total_tokens: int
    monthly_tokens: int | None
    tokens_left: int | None
    models: list[ModelUsage]
    object: str = "usage"


class UsageList(msgspec.Struct, kw_only=True):
    """Of all tenants."""

    data: list[TenantUsage]
    object: str = "list"

"""Reads: the limits of requests that do not count against a tenant's other limits.

They read what there is, or end what runs: polling costs little, but not nothing. Each gateway
counts alone.
"""

import asyncio
from typing import Final

from tokenmesh.services.gateway.core.tenancy.tenant import LocalLimits, RateLimited, Tenant
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.config.requests import TenancySettings
from tokenmesh.shared.errors import Overloaded
from tokenmesh.shared.fair_queue import FairSlots, Grant

_MAX_READING: Final = 1024
"""It bounds the reads of all tenants together."""
_MAX_WAITING: Final = 4096
"""Beyond it the tenant with the most of them gets a 429."""
_WAIT_S: Final = 30.0


class Reads:
    """A number a minute, and a number at a time; what is over the second waits."""

    def __init__(self, settings: TenancySettings) -> None:
        self._per_minute = settings.reads_per_minute
        self._most = settings.max_reads
        self._counts = LocalLimits()
        self._slots = FairSlots("reads", _MAX_READING, _MAX_WAITING, most_each=self._most)

    def count(self, tenant: Tenant) -> None:
        """Count one. Raises RateLimited."""
        counted = Tenant(name=tenant.name, requests_per_minute=self._per_minute)
        now = monotonic_s()
        refusal = self._counts.refusal(counted, 1, 0, now, "")
        if refusal is not None:
            raise RateLimited(
                f"the tenant {tenant.name} is over gateway.reads_per_minute = {self._per_minute}: "
                "requests that read or end something",
                retry_after_s=refusal[1],
            )
        self._counts.admit(counted, 1, (), now, "")

    async def take(self, tenant: Tenant) -> Grant:
        """One of the tenant's places, which is to be released. Raises RateLimited."""
        try:
            async with asyncio.timeout(_WAIT_S):
                return await self._slots.take(tenant.name)
        except (TimeoutError, Overloaded) as error:
            raise RateLimited(
                f"too many reads of the tenant {tenant.name} wait: gateway.max_reads = "
                f"{self._most} are answered at a time",
                retry_after_s=1.0,
            ) from error

    def release(self, place: Grant) -> None:
        """Give a place back, at the latest when the request ends."""
        self._slots.release(place)

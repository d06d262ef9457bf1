"""UploadQuota: limits the bytes of uploads, for each tenant and for all together.

Bytes are reserved before they are read if the length is known, else while they arrive. Reservations
expire, so those of a dead gateway are released.
"""

from dataclasses import dataclass
from typing import Final

from tokenmesh.services.gateway.core.tenancy.redis_state import (
    ALL_TENANTS,
    Scripts,
    expiry_key,
    upload_bytes_key,
    uploads_key,
)
from tokenmesh.services.gateway.core.tenancy.tenant import Tenant
from tokenmesh.shared.config.requests import TenancySettings
from tokenmesh.shared.errors import Overloaded, PayloadTooLarge, TokenMeshError
from tokenmesh.shared.redis import Redis

_OVERHEAD_BYTES: Final = 4096
"""Counted for each upload on top of its bytes: many empty files fill Redis as well."""
_STEP_BYTES: Final = 1 << 20
"""Smallest growth of a reservation."""
_GRACE_S: Final = 60


class UploadQuotaExceeded(Overloaded):
    """The tenant's uploads have used up their quota."""

    code = "upload_quota_exceeded"


class UploadQuota:
    """The upload quotas. `redis` None: nothing is counted, as nothing can be stored either."""

    def __init__(self, redis: Redis | None, settings: TenancySettings) -> None:
        self._script = Scripts(redis).uploads if redis is not None else None
        self._settings = settings

    def of(self, tenant: Tenant) -> int:
        """The quota of a tenant in bytes."""
        own = tenant.max_upload_bytes
        return self._settings.upload_bytes_per_tenant if own is None else own

    async def take(self, tenant: Tenant, upload: str, num_bytes: int, ttl_s: float) -> None:
        """Count an upload as that many bytes for `ttl_s`, in place of its earlier count.

        Raises PayloadTooLarge, UploadQuotaExceeded or Overloaded.
        """
        quota, counted = self.of(tenant), num_bytes + _OVERHEAD_BYTES
        if counted > quota:
            raise PayloadTooLarge(
                f"the file has {num_bytes} bytes, all uploads of the tenant {tenant.name} may have "
                f"{quota} (gateway.upload_bytes_per_tenant, or max_upload_bytes of the key file)",
                param="file",
            )
        found = await self._count(tenant.name, quota, upload, counted, ttl_s)
        if not found.fits:
            raise UploadQuotaExceeded(
                f"uploads of the tenant {tenant.name} use {found.others} of {quota} bytes: "
                "delete some, or wait until they expire",
                retry_after_s=found.wait_s,
            )
        total = self._settings.upload_bytes_total
        found = await self._count(ALL_TENANTS, total, upload, counted, ttl_s)
        if not found.fits:
            raise Overloaded(
                f"uploads of all tenants use {found.others} of {total} bytes",
                retry_after_s=found.wait_s,
            )

    async def release(self, tenant: str, upload: str) -> None:
        """Stop counting an upload. During an outage of Redis it counts until it expires."""
        try:
            # An upload that is not the tenant's must not be removed from the total.
            if (await self._count(tenant, 0, upload, 0, 0)).held:
                await self._count(ALL_TENANTS, 0, upload, 0, 0)
        except TokenMeshError:
            pass

    async def _count(
        self, name: str, quota: int, upload: str, num_bytes: int, ttl_s: float
    ) -> "_Count":
        if self._script is None:
            return _Count()
        keys = (uploads_key(name), upload_bytes_key(name), expiry_key(name))
        match await self._script(keys, (quota, upload, num_bytes, ttl_s)):
            case [int() as fits, int() as others, int() as held, int() as wait_s]:
                return _Count(fits == 1, others, held, wait_s)
            case answer:
                raise TokenMeshError(f"unexpected answer: {answer!r}")


@dataclass(frozen=True, slots=True)
class _Count:
    fits: bool = True
    others: int = 0
    """Bytes of the other uploads."""
    held: int = 0
    """Bytes of this one before the call."""
    wait_s: int = 0


class UploadReservation:
    """The bytes of one upload while it arrives. Released unless `keep` is called."""

    def __init__(self, quota: UploadQuota, tenant: Tenant, upload: str, timeout_s: float) -> None:
        self._quota = quota
        self._tenant = tenant
        self._upload = upload
        self._ttl_s = timeout_s + _GRACE_S
        self._num_bytes = 0

    async def grow(self, num_bytes: int) -> None:
        """Reserve at least that many bytes. Raises as `UploadQuota.take`."""
        if num_bytes > self._num_bytes:
            step = _STEP_BYTES if self._num_bytes else 0
            wanted = max(num_bytes, self._num_bytes + step)
            await self._quota.take(self._tenant, self._upload, wanted, self._ttl_s)
            self._num_bytes = wanted

    async def keep(self, num_bytes: int, ttl_s: float) -> None:
        """Count a complete upload for as long as it is stored."""
        await self._quota.take(self._tenant, self._upload, num_bytes, ttl_s)

    async def release(self) -> None:
        """Release the bytes of an upload that failed."""
        await self._quota.release(self._tenant.name, self._upload)

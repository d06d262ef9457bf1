"""Lease: what a running request of a tenant counts for, until it is released."""

from collections.abc import Awaitable, Callable, Sequence

from tokenmesh.services.gateway.tenancy.tenant import Tenant

Release = Callable[[Tenant, Sequence[str]], None]
Widen = Callable[["Lease", int, int], Awaitable[None]]


class Lease:
    """Made by Admission. A request counts once, and one sequence at a time, until it is widened."""

    def __init__(self, tenant: Tenant, name: str, release: Release, widen: Widen) -> None:
        self.tenant = tenant
        self.name = name
        self._names: list[str] = [name]
        self._release = release
        self._widen = widen

    def add(self, names: Sequence[str]) -> None:
        """Further sequences that are released together with the first one."""
        self._names.extend(names)

    async def widen(self, requests: int, sequences: int) -> None:
        """Count as that many requests and sequences in all. Raises Overloaded or InvalidInput."""
        await self._widen(self, requests, sequences)

    def release(self) -> None:
        """The request is over. Further calls do nothing."""
        names, self._names = self._names, []
        if names:
            self._release(self.tenant, names)

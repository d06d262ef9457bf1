"""GatewayWatch: which gateways have been gone for so long that nobody reads their streams."""

from collections.abc import Callable, Iterable

from tokenmesh.shared.ids import GatewayId


class GatewayWatch:
    """Remembers when each gateway was last alive. Times are monotonic seconds."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._last_alive: dict[GatewayId, float] = {}

    def gone(
        self, gateways: Iterable[GatewayId], is_alive: Callable[[GatewayId], bool], now: float
    ) -> set[GatewayId]:
        """Those of `gateways` that were not alive for the grace time; others are forgotten.

        A gateway that was never seen alive counts from when it is first asked about.
        """
        last_alive = {
            gateway: now if is_alive(gateway) else self._last_alive.get(gateway, now)
            for gateway in gateways
        }
        self._last_alive = last_alive
        return {gateway for gateway, at in last_alive.items() if now - at > self._grace_s}

"""WatchTimes: how patient a gateway is with workers and streams. Seconds throughout."""

from dataclasses import dataclass

from tokenmesh.shared.config.gateway import GatewaySettings


@dataclass(frozen=True, slots=True)
class WatchTimes:
    """The fields of the same names in `GatewaySettings`."""

    silence_s: float = 0.015
    silence_factor: float = 1.5
    silence_max_s: float = 0.05
    ping_timeout_s: float = 0.15
    ping_factor: float = 4.0
    ping_timeout_max_s: float = 5.0
    lag_factor: float = 5.0
    resend_interval_s: float = 0.1
    stall_s: float = 1.0
    stall_max_s: float = 15.0

    @classmethod
    def of(cls, settings: GatewaySettings) -> "WatchTimes":
        """The configured ones."""
        return cls(
            silence_s=settings.silence_s,
            silence_factor=settings.silence_factor,
            silence_max_s=settings.silence_max_s,
            ping_timeout_s=settings.ping_timeout_s,
            ping_factor=settings.ping_factor,
            ping_timeout_max_s=settings.ping_timeout_max_s,
            lag_factor=settings.lag_factor,
            resend_interval_s=settings.resend_interval_s,
            stall_s=settings.stall_s,
            stall_max_s=settings.stall_max_s,
        )

"""The bounds of an actor."""

from dataclasses import dataclass

from tokenmesh.shared.config.service import ServiceSettings


@dataclass(frozen=True, slots=True)
class ActorLimits:
    """Meanings and units are those of the fields of the same names in `ServiceSettings`."""

    mailbox_size: int = 1024
    concurrency: int = 256
    handler_timeout_s: float = 600.0
    overloaded_retry_after_s: float = 0.5
    cancel_grace_s: float = 2.0

    @classmethod
    def of(cls, settings: ServiceSettings) -> "ActorLimits":
        """The configured bounds."""
        return cls(
            mailbox_size=settings.mailbox_size,
            concurrency=settings.concurrency,
            handler_timeout_s=settings.handler_timeout_s,
            overloaded_retry_after_s=settings.overloaded_retry_after_s,
            cancel_grace_s=settings.cancel_grace_s,
        )

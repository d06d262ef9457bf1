"""The journal of responses: one stream for the whole mesh."""

from typing import Final

from tokenmesh.shared.bus.jetstream import JetStreamJournal, StreamSpec
from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.config.responses import ResponseSettings
from tokenmesh.shared.subjects import RESPONSES

_STREAM: Final = "tm-responses"


def open_journal(bus: MessageBus, settings: ResponseSettings) -> JetStreamJournal:
    """The journal with its limits as configured; its stream is made when it is first needed."""
    spec = StreamSpec(
        name=_STREAM,
        subjects=RESPONSES,
        max_age_s=settings.retention_s,
        max_bytes=settings.max_total_bytes,
        max_entry_bytes=settings.max_record_bytes,
        replicas=settings.replicas,
    )
    return JetStreamJournal(
        bus,
        spec,
        timeout_s=settings.journal_timeout_s,
        patience_s=settings.journal_patience_s,
        mute_s=settings.journal_mute_s,
    )

"""check_beat: what a beat may say. Nothing on the bus is believed blindly."""

from math import isfinite
from typing import Final

import msgspec

from tokenmesh.shared.errors import ProtocolError
from tokenmesh.shared.messages import Heartbeat
from tokenmesh.shared.messages.beat import ModelCard, WorkerLoad
from tokenmesh.shared.subjects import beat as beat_subject

_MAX_INTERVAL_S: Final = 60.0
"""Somebody who need not beat for longer would never count as gone."""
_MAX_NUMBER: Final = 2.0**53
_MAX_MODELS: Final = 256
_MAX_NAME_CHARS: Final = 1024


def check_beat(beat: Heartbeat, subject: str) -> None:
    """Raises ProtocolError for a beat that no process of ours would send on `subject`."""
    wrong = _wrong(beat, subject)
    if wrong is not None:
        raise ProtocolError(f"a beat of {beat.instance_id[:64]!r} with {wrong}")


def _wrong(beat: Heartbeat, subject: str) -> str | None:
    if subject != beat_subject(beat.service, beat.instance_id):
        return "another sender than its subject names"
    if not 0 < beat.interval_s <= _MAX_INTERVAL_S:
        return f"an interval of {beat.interval_s} s"
    cards = [*beat.models, *beat.tokenizes]
    if len(cards) > _MAX_MODELS:
        return f"{len(cards)} models"
    if not all(_is_sane(card) for card in cards):
        return "a model that cannot be"
    return "a load that cannot be" if beat.load is not None and not _is_sane(beat.load) else None


def _is_sane(part: ModelCard | WorkerLoad) -> bool:
    """Numbers are finite and not negative, names have a bound."""
    return all(_may_be(value) for value in msgspec.structs.astuple(part))


def _may_be(value: object) -> bool:
    if isinstance(value, int | float):
        return isfinite(value) and 0 <= value <= _MAX_NUMBER
    return not isinstance(value, str) or len(value) <= _MAX_NAME_CHARS

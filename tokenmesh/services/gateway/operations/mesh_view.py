"""MeshView: every process of the mesh by its last heartbeat, and draining one of them."""

import difflib
import logging
from typing import Any

import msgspec

import tokenmesh
from tokenmesh.shared.bus.base import Bus
from tokenmesh.shared.clock import monotonic_s, now_s
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import Forbidden, NotFound
from tokenmesh.shared.ids import GatewayId, InstanceId
from tokenmesh.shared.membership import Member, Members
from tokenmesh.shared.messages import Drain, Heartbeat
from tokenmesh.shared.messages.beat import PROTOCOL
from tokenmesh.shared.subjects import process_control

logger = logging.getLogger(__name__)


class MeshView:
    """The mesh as one gateway sees it."""

    def __init__(
        self, gateway_id: GatewayId, bus: Bus, members: Members, settings: GatewaySettings
    ) -> None:
        self._id = gateway_id
        self._bus = bus
        self._members = members
        self._settings = settings

    def state(self) -> dict[str, Any]:
        """As JSON values; processes sorted by service and id."""
        now = monotonic_s()
        members = sorted(
            self._members.all(), key=lambda each: (each.beat.service, each.beat.instance_id)
        )
        foreign = [_identity(beat) for beat in self._members.foreign.all(now)]
        return {
            "gateway": self._id,
            "version": tokenmesh.__version__,
            "protocol": PROTOCOL,
            "processes": [_process(member, now) for member in members],
            "other_protocols": foreign,
        }

    async def drain(self, instance_id: str) -> None:
        """Send Drain to a process and wait for its answer.

        Raises Forbidden without `gateway.admin_routes`, NotFound for an unknown id.
        """
        if not self._settings.admin_routes:
            raise Forbidden("the gateway was started without --enable-admin-routes", param="id")
        member = self._members.get(InstanceId(instance_id))
        if member is None:
            raise NotFound(self._not_found(instance_id), param="id")
        if member.beat.draining:
            return
        logger.info("draining %s", instance_id)
        deadline_s = now_s() + self._settings.drain_timeout_s
        subject = process_control(member.beat.instance_id)
        await self._bus.request(subject, Drain(), deadline_s=deadline_s)

    def _not_found(self, instance_id: str) -> str:
        known = [member.beat.instance_id for member in self._members.all()]
        near = difflib.get_close_matches(instance_id, known, n=3, cutoff=0.5) or sorted(known)[:8]
        return f"no process {instance_id[:64]!r} in the mesh; known: {', '.join(near)}"


def _identity(beat: Heartbeat) -> dict[str, Any]:
    return {
        "id": beat.instance_id,
        "service": beat.service,
        "version": beat.version,
        "protocol": beat.protocol,
        # A string: it exceeds JavaScript's integers.
        "epoch": str(beat.epoch),
    }


def _process(member: Member, now: float) -> dict[str, Any]:
    beat = member.beat
    return {
        **_identity(beat),
        "draining": beat.draining,
        "last_beat_s": round(now - member.last_seen, 3),
        "queued": beat.queued,
        "models": [card.name for card in beat.models],
        "load": None if beat.load is None else msgspec.structs.asdict(beat.load),
    }

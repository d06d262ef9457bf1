"""Attacks on whatever a process has subscribed to."""

from random import Random

from tests.fakes.hostile_messages import (
    FORGED_HEADERS,
    HARMLESS_HEADERS,
    undecodable,
    well_formed,
)
from tests.servers import MAX_PAYLOAD_BYTES
from tokenmesh.shared import codec
from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.bus.nats import NatsLink
from tokenmesh.shared.messages import Ping
from tokenmesh.shared.service import Mesh

FOREIGN = ("_INBOX.", "$SRV.")
"""Beginnings of subjects on which answers come, or whose messages are not ours."""


def listened(service: Mesh) -> list[str]:
    """Return the subjects to which a process has subscribed, by its connection."""
    link = service.bus._link
    assert isinstance(link, NatsLink)
    return sorted({each.inner.subject for each in link._subscriptions})


def concrete(subject: str) -> str:
    """One subject that a subscription covers."""
    return subject.replace("*", "forged").replace(">", "worker.forged")


def noted(service: Mesh) -> int:
    return sum(service.bus.counts.values())


async def attack(bus: MessageBus, subject: str, rng: Random, service: Mesh) -> int:
    """Everything at once; how much of it no process can decode."""
    count = 0
    for data in undecodable(rng):
        await bus._link.send(subject, data, None)
        count += 1
    for headers in FORGED_HEADERS:
        await bus._link.send(subject, codec.encode(Ping()), headers)
        count += 1
    for data in well_formed():
        await bus._link.send(subject, data, None)
    for headers in HARMLESS_HEADERS:
        await bus._link.send(subject, codec.encode(Ping()), headers)
    await bus._link.send(subject, rng.randbytes(1) * (MAX_PAYLOAD_BYTES - 100), None)
    await bus.flush()
    # a server cuts off a client that does not read for long
    await service.bus.flush()
    return count + 1

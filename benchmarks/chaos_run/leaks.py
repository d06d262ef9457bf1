"""What must be gone once no client asks for anything: streams and their KV blocks."""

import asyncio
import re
import time

from benchmarks.chaos_run.cluster import Cluster
from benchmarks.serve.client import Server
from tokenmesh.shared.bus.nats import connect
from tokenmesh.shared.membership import Members, MembershipView
from tokenmesh.shared.messages.beat import WorkerLoad
from tokenmesh.shared.service.mesh import WORKER

_SETTLE_S = 15.0
_POLL_S = 0.25
_OPEN_STREAMS = re.compile(rb"^tokenmesh:open_streams(?:\{[^}]*\})? ([0-9.]+)", re.MULTILINE)


async def find_leaks(cluster: Cluster) -> list[str]:
    """What is still held after `_SETTLE_S`, as sentences; empty as soon as nothing is."""
    limits = cluster.settings.service
    bus = await connect(cluster.settings.bus, "chaos")
    members = Members(MembershipView(limits.missed_beats, limits.max_members))
    await members.start(bus)
    try:
        give_up_s = time.perf_counter() + _SETTLE_S
        while True:
            await asyncio.sleep(_POLL_S)
            held = _held_by_workers(cluster, members) + await _held_by_gateways(cluster)
            if not held or time.perf_counter() > give_up_s:
                return held
    finally:
        await members.stop()
        await bus.close()


def _held_by_workers(cluster: Cluster, members: Members) -> list[str]:
    expected = {child.instance_id for child in cluster.of(WORKER)}
    loads = {each.beat.instance_id: each.beat.load for each in members.service(WORKER)}
    missing = [f"{each} does not beat" for each in sorted(expected - set(loads))]
    unknown = [f"{each} beats, but nobody runs it" for each in sorted(set(loads) - expected)]
    held = [
        f"{name} holds {load.kv_blocks_used} blocks, {load.running} + {load.waiting} streams"
        for name, load in loads.items()
        if load is not None and _is_busy(load)
    ]
    return missing + unknown + held


def _is_busy(load: WorkerLoad) -> bool:
    return bool(load.kv_blocks_used or load.running or load.waiting)


async def _held_by_gateways(cluster: Cluster) -> list[str]:
    held = []
    for url in cluster.urls:
        found = _OPEN_STREAMS.search(await Server(url, None).ask("GET", "/metrics"))
        if found is None or float(found[1]):
            held.append(f"{url}: open streams: {found and found[1].decode()}")
    return held

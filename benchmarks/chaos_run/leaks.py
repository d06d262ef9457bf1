"""Finds what is left in processes, Redis, NATS and on disk once no client asks for anything."""

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks.chaos_run.accounts import ADMIN
from benchmarks.chaos_run.cluster import Cluster
from benchmarks.chaos_run.held_by_servers import (
    OWN_NAME,
    most_subscriptions,
    open_marks,
    reserved,
)
from tokenmesh.cli.bench.client import Target
from tokenmesh.shared.bus.message_bus import MessageBus, connect
from tokenmesh.shared.membership import Members, MembershipView
from tokenmesh.shared.messages.beat import WorkerLoad
from tokenmesh.shared.redis import Redis, open_redis

_SETTLE_S = 30.0
_POLL_S = 0.25
_IN_USE = re.compile(
    rb"^tokenmesh:(open_streams|responses_running)(?:\{[^}]*\})? ([0-9.]+)", re.MULTILINE
)


class LeakWatch:
    """Use `watching`, before the first request."""

    def __init__(self, cluster: Cluster, bus: MessageBus, members: Members, redis: Redis) -> None:
        self._cluster = cluster
        self.bus = bus
        self._members = members
        self._redis = redis
        self._subscriptions: dict[str, list[str]] = {}

    async def begin(self) -> None:
        """Remember what a process of each service has subscribed to."""
        self._subscriptions = await most_subscriptions(self._cluster)

    async def find(self) -> list[str]:
        """Describe what is held after `_SETTLE_S`; empty as soon as nothing is."""
        give_up_s = time.perf_counter() + _SETTLE_S
        while True:
            await asyncio.sleep(_POLL_S)
            held = await self._held()
            if not held or time.perf_counter() > give_up_s:
                return held

    async def _held(self) -> list[str]:
        return [
            *_held_by_workers(self._cluster, self._members),
            *await _held_by_gateways(self._cluster),
            *await reserved(self._redis),
            *await open_marks(self.bus, self._cluster.settings.responses),
            *await self._new_subscriptions(),
        ]

    async def _new_subscriptions(self) -> list[str]:
        found = await most_subscriptions(self._cluster)
        return [
            f"a {name} has the subscriptions {now}, at the start {self._subscriptions.get(name)}"
            for name, now in found.items()
            if len(now) > len(self._subscriptions.get(name, ()))
        ]


@asynccontextmanager
async def watching(cluster: Cluster) -> AsyncIterator[LeakWatch]:
    """Looks into a cluster that has just started."""
    limits = cluster.settings.service
    bus = await connect(cluster.settings.bus, OWN_NAME)
    members = Members(MembershipView(limits.missed_beats, limits.max_members))
    redis = open_redis(cluster.settings.redis)
    await members.start(bus)
    try:
        watch = LeakWatch(cluster, bus, members, redis)
        await watch.begin()
        yield watch
    finally:
        await members.stop()
        await redis.close()
        await bus.close()


def leftover_files(cluster: Cluster) -> list[str]:
    """Temporary files that outlived their processes."""
    return [f"left behind: {each}" for each in _files(cluster.temporary)]


def _files(folder: Path) -> list[Path]:
    return sorted(each for each in folder.rglob("*") if each.is_file())


def _held_by_workers(cluster: Cluster, members: Members) -> list[str]:
    expected = {child.instance_id for child in cluster.of("worker")}
    loads = {each.beat.instance_id: each.beat.load for each in members.service("worker")}
    missing = [f"{each} does not beat" for each in sorted(expected - set(loads))]
    unknown = [
        f"{each} sends heartbeats, but was not started here"
        for each in sorted(set(loads) - expected)
    ]
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
    for url in (*cluster.urls, *cluster.responder_urls):
        counts = dict(_IN_USE.findall(await Target(url, ADMIN).fetch("GET", "/metrics")))
        if not counts:
            held.append(f"{url} does not tell its streams")
        held += [
            f"{url}: {name.decode()}: {count.decode()}"
            for name, count in counts.items()
            if float(count)
        ]
    return held

"""Injects faults into the mesh, all of them drawn from one seed."""

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from random import Random
from typing import Final, Literal

import psutil

from benchmarks.chaos_run.child import Child
from benchmarks.chaos_run.cluster import LEAVE_S, Cluster
from benchmarks.chaos_run.held_by_servers import forget

Kind = Literal["kill", "freeze", "terminate", "long outage", "nothing"]

_SERVICES = ("worker", "worker", "worker", "tokenizer", "scheduler", "responder")
_SERVICE_KINDS: tuple[Kind, ...] = ("kill", "freeze", "terminate")
_CHOICES: list[tuple[Kind, str]] = [
    *((kind, service) for service in _SERVICES for kind in _SERVICE_KINDS),
    ("kill", "nats"),
    ("terminate", "nats"),
    ("kill", "redis"),
    ("freeze", "redis"),
    ("terminate", "redis"),
    # What the machine itself does to streams: the others must be read against it.
    ("nothing", "any process"),
]
TRANSFER: Final = "transfer"
"""In the place of a service: the process of a worker that moves KV."""
_OF_KV: list[tuple[Kind, str]] = [
    ("kill", TRANSFER),
    ("freeze", TRANSFER),
    # gateways with streams whose KV is being sent to a worker
    ("kill", "responder"),
    ("terminate", "responder"),
]
_TRANSFER_MODULE: Final = "tokenmesh.services.worker_svc.kv.transfer"
_RARE: list[tuple[Kind, str]] = [("long outage", "nats"), ("long outage", "redis")]
_ROUNDS_A_RARE_ONE = 3
_PAUSE_S: dict[Kind, tuple[float, float]] = {
    "kill": (0.0, 1.0),
    "freeze": (0.3, 4.0),
    "terminate": (0.0, 1.0),
    "long outage": (5.0, 10.0),
    "nothing": (0.0, 1.0),
}
"""The bounds of the time that a process stands still, or is away before it is started again."""
_FORGETS = (True, True, False)
"""A Redis that has ended comes back without what it held, usage apart, or with it."""
_POLL_S = 0.05


@dataclass(slots=True)
class Fault:
    """One fault; times are `time.perf_counter` seconds."""

    kind: Kind
    service: str
    began_s: float = inf
    healed_s: float = inf

    @property
    def label(self) -> str:
        """For reports."""
        return f"{self.kind} {self.service}"


class Chaos:
    """Hurts one process after the other; never the last one of a service that is well."""

    def __init__(self, cluster: Cluster, random: Random, interval_s: float) -> None:
        self._cluster = cluster
        self._random = random
        self._interval_s = interval_s
        self.faults: list[Fault] = []
        self.stalls: list[tuple[float, float]] = []
        """When this process itself stood still, and for how long: nothing is to be learnt then."""
        self.unclean: list[str] = []
        """Processes that did not end well although they were asked to."""

    async def run(self, kinds: Sequence[tuple[Kind, str]], until_s: float) -> None:
        """Carry out the faults, and return when all have healed. Raises RuntimeError.

        In order, but for those that have to wait until another process of the service is well.
        """
        left = list(kinds)
        async with asyncio.TaskGroup() as healing:
            while left:
                await asyncio.sleep(self._interval_s * self._random.uniform(0.5, 1.5))
                if time.perf_counter() > until_s:
                    return
                kind, service = left.pop(await self._first_possible(left))
                fault = Fault(kind, service, time.perf_counter())
                self.faults.append(fault)
                victims = self._well(service)
                victim = self._random.choice(victims) if victims else None
                pause_s = self._random.uniform(*_PAUSE_S[kind])
                forgets = service == "redis" and self._random.choice(_FORGETS)
                healing.create_task(self._hurt(fault, victim, pause_s, forgets=forgets))

    async def _first_possible(self, left: Sequence[tuple[Kind, str]]) -> int:
        while True:
            for index, (_, service) in enumerate(left):
                if len(self._well(service)) >= min(2, len(self._cluster.of(_owner_of(service)))):
                    return index
            await asyncio.sleep(_POLL_S)

    def _well(self, service: str) -> list[Child]:
        return [child for child in self._cluster.of(_owner_of(service)) if child.is_well]

    async def _hurt(
        self, fault: Fault, victim: Child | None, pause_s: float, *, forgets: bool
    ) -> None:
        if fault.service == TRANSFER and victim is not None:
            await _hurt_transfer(fault.kind, victim, pause_s)
        elif victim is not None:
            victim.is_well = False
            await carry_out(fault.kind, victim, pause_s, self._note_end)
            if forgets and fault.kind != "freeze":
                await forget(self._cluster.settings.redis)
        else:
            await asyncio.sleep(pause_s)
        fault.healed_s = time.perf_counter()

    def _note_end(self, kind: Kind, victim: Child) -> None:
        if kind == "terminate" and victim.exit_code != 0:
            self.unclean.append(f"{victim.name} ends with {victim.exit_code} after a SIGTERM")


def _owner_of(service: str) -> str:
    return "worker" if service == TRANSFER else service


async def _hurt_transfer(kind: Kind, worker: Child, pause_s: float) -> None:
    """Hurt the process of a worker that moves KV; the worker starts it again."""
    for process in worker.descendants():
        try:
            if _TRANSFER_MODULE in process.cmdline():
                process.send_signal(signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
                await asyncio.sleep(pause_s)
                process.send_signal(signal.SIGCONT)
        except psutil.Error:
            # it has ended, with its worker or by it
            continue


def _ignore(_kind: Kind, _victim: Child) -> None:
    """For who does not ask how a process ends."""


async def carry_out(
    kind: Kind,
    victim: Child,
    pause_s: float,
    on_end: Callable[[Kind, Child], None] = _ignore,
) -> None:
    """Hurt a process and return when it serves again. Raises RuntimeError when it does not."""
    if kind == "freeze":
        victim.send(signal.SIGSTOP)
        await asyncio.sleep(pause_s)
        victim.send(signal.SIGCONT)
        victim.is_well = True
        return
    victim.send(signal.SIGTERM if kind == "terminate" else signal.SIGKILL)
    if not await victim.wait_end(LEAVE_S):
        raise RuntimeError(f"{victim.name} did not leave within {LEAVE_S:g} s of a SIGTERM")
    on_end(kind, victim)
    await asyncio.sleep(pause_s)
    await victim.start()
    await victim.wait_ready()


def draw(random: Random, count: int, *, moves_kv: bool = False) -> list[tuple[Kind, str]]:
    """Draw faults: every kind in turn, in random order; long outages less often than others.
    moves_kv: workers have processes for that."""
    drawn: list[tuple[Kind, str]] = []
    choices = [*_CHOICES, *(_OF_KV * 2 if moves_kv else ())]
    kinds = [*(choices * _ROUNDS_A_RARE_ONE), *_RARE]
    while len(drawn) < count:
        drawn += random.sample(kinds, len(kinds))
    return drawn[:count]

"""Compares the usage of each tenant in the mesh with what clients received and what logs say.

A stored response counts by its log: one that was begun and never seen by its client, because the
gateway died with the first event, was made all the same. Everything else counts by what a client
read in its stream.
"""

import asyncio
import hashlib
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.chaos_run.received import ReceivedResponse
from tokenmesh.cli.bench.client import Target
from tokenmesh.services.gateway.apis.responses.event_log import tokens_of
from tokenmesh.services.gateway.apis.responses.response_logs import ResponseLogs, open_journal
from tokenmesh.services.gateway.core.tenancy.usage import TenantUsage, UsageList
from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.config.responses import ResponseSettings
from tokenmesh.shared.ids import ResponseId
from tokenmesh.shared.subjects import response_log

TENANTS = ("amber", "birch", "cedar")
RECORDER = "recorder"
"""Asks for what the others' answers are compared with, in peace."""
ROAMER = "dahlia"
"""Asks again when a gateway dies. Is not audited: the death takes what was not counted yet."""
ADMIN = "ops"

_KINDS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
_SETTLE_S = 15.0
_POLL_S = 0.25

Counts = Mapping[str, Counter[str]]
"""By tenant."""


def write_key_file(folder: Path) -> Path:
    """A key for each tenant: its name."""
    lines = []
    for name in (*TENANTS, RECORDER, ROAMER, ADMIN):
        digest = hashlib.sha256(name.encode()).hexdigest()
        lines += [f"[tenants.{name}]", f"admin = {str(name == ADMIN).lower()}"]
        lines += ["[[keys]]", f'sha256 = "{digest}"', f'tenant = "{name}"']
    path = folder / "keys.toml"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def servers_of(urls: Sequence[str], tenants: Sequence[str] = TENANTS) -> dict[str, list[Target]]:
    """The gateways as each tenant may ask them."""
    return {tenant: [Target(url, tenant) for url in urls] for tenant in tenants}


def reported(received: Iterable[ReceivedResponse]) -> Counts:
    """The sums of what clients read in their streams."""
    sums: dict[str, Counter[str]] = defaultdict(Counter)
    for each in received:
        if each.usage is not None:
            sums[each.tenant] += each.usage
    return sums


async def logged(
    bus: MessageBus, settings: ResponseSettings, received: Iterable[ReceivedResponse]
) -> tuple[Counts, list[str]]:
    """The sums of what the logs of stored responses end with, and where a client read otherwise."""
    logs = ResponseLogs(open_journal(bus, settings), settings)
    keys = await logs.journal.keys(response_log(ResponseId("*")))
    sums: dict[str, Counter[str]] = defaultdict(Counter)
    by_id: dict[str, Counter[str]] = {}
    for key in keys:
        response_id = ResponseId(key.rpartition(".")[2])
        log = await logs.read(response_id)
        tokens = tokens_of(log.ended) if log.ended is not None else None
        if log.begun is not None and tokens is not None:
            counts = (tokens.requests, tokens.prompt, tokens.cached, tokens.completion)
            by_id[response_id] = Counter(dict(zip(_KINDS, counts, strict=True)))
            sums[log.begun.tenant] += by_id[response_id]
    otherwise = [
        f"{each.response_id}: its client read {dict(each.stored_usage)}"
        for each in received
        if each.stored_usage is not None and by_id.get(each.response_id) != each.stored_usage
    ]
    return sums, otherwise


@dataclass(slots=True)
class Audit:
    """The result of the comparison."""

    expected: dict[str, dict[str, int]] = field(default_factory=dict)
    """Requests and tokens by tenant."""
    differences: list[str] = field(default_factory=list)


async def audit(
    urls: Sequence[str],
    model: str,
    received: Sequence[ReceivedResponse],
    bus: MessageBus,
    settings: ResponseSettings,
) -> Audit:
    """Compare, again and again for some seconds: what has just ended may be on its way."""
    give_up_s = time.perf_counter() + _SETTLE_S
    while True:
        of_logs, otherwise = await logged(bus, settings, received)
        of_streams = reported(received)
        expected = {
            tenant: of_streams.get(tenant, Counter()) + of_logs.get(tenant, Counter())
            for tenant in TENANTS
        }
        differences = otherwise + await differences_of(urls, model, expected)
        if not differences or time.perf_counter() > give_up_s:
            return Audit({name: dict(counts) for name, counts in expected.items()}, differences)
        await asyncio.sleep(_POLL_S)


async def differences_of(urls: Sequence[str], model: str, expected: Counts) -> list[str]:
    """Describe what is counted otherwise than expected, for each tenant and kind."""
    found = []
    for tenant, counts in expected.items():
        # each gateway tells Redis what it has before it answers
        answers = [await Target(url, tenant).fetch("GET", "/v1/usage") for url in (*urls, urls[0])]
        own = msgspec.json.decode(answers[-1], type=TenantUsage)
        by_model = {each.model: each for each in own.models}
        counted = {kind: getattr(by_model.get(model), kind, 0) for kind in _KINDS}
        found += [
            f"{tenant}: {counted[kind]} {kind} counted, {counts[kind]} reported"
            for kind in _KINDS
            if counted[kind] != counts[kind]
        ]
        found += [f"{tenant}: usage of {name}" for name in by_model if name != model]
        found += await _admins_view(urls, own)
    return found


async def _admins_view(urls: Sequence[str], own: TenantUsage) -> list[str]:
    answer = await Target(urls[0], ADMIN).fetch("GET", "/v1/usage/tenants")
    seen = {each.tenant: each for each in msgspec.json.decode(answer, type=UsageList).data}
    shown: Any = seen.get(own.tenant)
    return [] if shown == own else [f"{own.tenant}: an admin sees {shown}, its key {own}"]

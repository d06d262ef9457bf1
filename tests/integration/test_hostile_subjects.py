"""Whatever a client writes to any subject of any service: counted, logged once a kind, harmless."""

import asyncio
import logging
import re
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import pytest

from tests.fakes.hostile_bus import FOREIGN, attack, concrete, listened, noted
from tests.fakes.small_mesh import SmallMesh
from tokenmesh.shared import subjects
from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.service import Mesh
from tokenmesh.shared.service.run import ProcessControl
from tokenmesh.shared.subject_table import SUBJECTS


@pytest.fixture
async def mesh(
    tmp_path: Path, bus_settings: BusSettings, redis_settings: RedisSettings
) -> AsyncIterator[SmallMesh]:
    events = {"enabled": True}
    async with SmallMesh(tmp_path, bus_settings, redis_settings, block_events=events) as small:
        for each in services(small).values():
            subject = subjects.process_control(each.instance_id)
            await each.listen(ProcessControl(lambda: None, Metrics()), subject)
        yield small


def services(mesh: SmallMesh) -> dict[str, Mesh]:
    """The encoder is not among them: it listens to nothing for a text model."""
    return {
        "gateway": mesh.gateway,
        "scheduler": mesh.scheduler,
        "tokenizer": mesh.tokenizer,
        "worker": mesh.workers[0],
    }


def is_listed(subject: str) -> bool:
    patterns = [each.wildcard for each in SUBJECTS]
    # a wildcard of many tokens is listed if what it covers is
    return subject.startswith(FOREIGN) or any(
        _covers(pattern, subject) or _covers(subject, pattern) for pattern in patterns
    )


def _covers(pattern: str, subject: str) -> bool:
    words = {"*": r"[^.]+", ">": r".+"}
    expression = r"\.".join(words.get(each, re.escape(each)) for each in pattern.split("."))
    return re.fullmatch(expression, subject) is not None


async def text_of(mesh: SmallMesh) -> str:
    answer = await mesh.complete()
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


async def test_every_subject_that_is_listened_to_is_in_the_reference(mesh: SmallMesh) -> None:
    found = {each for service in services(mesh).values() for each in listened(service)}
    assert len(found) > 15
    assert [each for each in sorted(found) if not is_listed(each)] == []


@pytest.mark.parametrize("name", ["gateway", "scheduler", "tokenizer", "worker"])
async def test_nothing_on_any_subject_of_a_service_does_harm(
    mesh: SmallMesh, bus: MessageBus, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    rng = Random(name)
    expected = await text_of(mesh)
    caplog.set_level(logging.WARNING)
    service = services(mesh)[name]
    before, expected_notes = noted(service), 0
    answering = asyncio.create_task(mesh.complete(max_tokens=200))
    for subject in listened(service):
        count = await attack(bus, concrete(subject), rng, service)
        is_ours = not subject.startswith(FOREIGN)
        expected_notes += count if is_ours else 0
    await mesh.until(lambda: noted(service) - before >= expected_notes, seconds=15)
    assert (await answering).status_code == 200
    assert await text_of(mesh) == expected
    alive = {each.beat.service for each in mesh.gateway.members.all()}
    assert alive >= set(services(mesh))
    said = Counter(each.getMessage().partition(" (")[0] for each in caplog.records)
    # one line a kind and process: all hear beats and spans, five buses and the test's own
    assert {text: count for text, count in said.items() if count > 6} == {}, said
    assert [each for each in caplog.records if each.levelno >= logging.ERROR] == []
    assert all(len(each.getMessage()) < 2000 for each in caplog.records)
    text = service.metrics.render().decode()
    counted = sum(
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith("tokenmesh:bus_complaints_total")
    )
    assert counted >= expected_notes

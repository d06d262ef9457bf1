"""AdapterStore: names, what is in memory, streams that wait their turn, which paths are read."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from tokenmesh.engine.adapters.adapter import ReadAdapter, SimMatrices
from tokenmesh.services.worker_svc.adapters import directories
from tokenmesh.services.worker_svc.adapters.directories import AdapterDirectories
from tokenmesh.services.worker_svc.adapters.lease import AdapterTurn
from tokenmesh.services.worker_svc.adapters.store import AdapterStore, adapter_of
from tokenmesh.shared.config.lora import LoraSettings
from tokenmesh.shared.errors import (
    Cancelled,
    ConfigError,
    Conflict,
    Forbidden,
    InvalidInput,
    NotFound,
    Overloaded,
    TokenMeshError,
    Unavailable,
)
from tokenmesh.shared.hashing import Adapter
from tokenmesh.shared.ids import GatewayId, ModelName, RequestId
from tokenmesh.shared.messages import Generate
from tokenmesh.shared.messages.sampling import SamplingParams


class Source:
    """The content of an adapter is the text of its file."""

    def __init__(self) -> None:
        self.reads: list[str] = []
        self.may_read = threading.Event()
        self.may_read.set()

    def read(self, directory: Path) -> ReadAdapter:
        self.may_read.wait(5)
        self.reads.append(directory.name)
        content = (directory / "content").read_text()
        if content == "bad":
            raise InvalidInput("it is bad", param="lora_path")
        return ReadAdapter(SimMatrices(content, 1), content, 1, None)


class Rig:
    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.source = Source()
        values = {"enable_lora": True, "allowed_dirs": [str(folder)], **settings}
        self.settings = LoraSettings.model_validate(values)
        directories = AdapterDirectories(self.settings)
        self.store = AdapterStore(self.settings, self.source, directories)

    def write(self, name: str, content: str = "") -> str:
        (self.folder / name).mkdir(exist_ok=True)
        (self.folder / name / "content").write_text(content or name)
        return str(self.folder / name)

    async def load(self, name: str, content: str = "", **more: Any) -> Adapter:
        known, _ = await self.store.load(name, self.write(name, content), **more)
        return known.adapter

    @property
    def in_memory(self) -> set[str]:
        return {card.name for card in self.store.cards() if card.is_in_memory}


async def test_the_least_recently_used_matrices_leave_memory_and_come_back(tmp_path: Path) -> None:
    rig = Rig(tmp_path, max_loras=2)
    a, b, c = [await rig.load(name) for name in "abc"]
    assert rig.in_memory == {"b", "c"}
    (await rig.store.lease(b)).release()
    (await rig.store.lease(a)).release()
    assert rig.in_memory == {"a", "b"}
    assert rig.source.reads == ["a", "b", "c", "a"]
    assert rig.store.lease_now(c) is None


async def test_streams_wait_in_their_order_until_others_have_ended(tmp_path: Path) -> None:
    rig = Rig(tmp_path, max_loras=1)
    a, b = await rig.load("a"), await rig.load("b")
    first, again = await rig.store.lease(a), await rig.store.lease(a)
    waiting = asyncio.create_task(rig.store.lease(b))
    await asyncio.sleep(0)
    # the name is in use, but one that came before waits
    behind = asyncio.create_task(rig.store.lease(a))
    await asyncio.sleep(0)
    assert rig.store.num_waiting == 2
    first.release()
    first.release()
    await asyncio.sleep(0.01)
    assert not waiting.done()
    again.release()
    lease = await waiting
    assert lease.adapter.content_hash == "b"
    await asyncio.sleep(0.01)
    assert not behind.done()
    lease.release()
    assert (await behind).adapter.content_hash == "a"
    assert rig.store.num_waiting == 0


async def test_a_stream_that_waits_too_long_or_leaves_makes_room(tmp_path: Path) -> None:
    # reads have this deadline, too, at a low priority
    rig = Rig(tmp_path, max_loras=1, load_timeout_s=0.5)
    a, b = await rig.load("a"), await rig.load("b")
    held = await rig.store.lease(a)
    gone = asyncio.create_task(rig.store.lease(b))
    await asyncio.sleep(0)
    gone.cancel()
    with pytest.raises(Overloaded, match="streams of 1 other adapters are running"):
        await rig.store.lease(b)
    assert rig.store.num_waiting == 0
    held.release()
    assert (await rig.store.lease(b)).adapter.content_hash == "b"


async def test_a_stream_that_has_ended_gives_up_its_turn(tmp_path: Path) -> None:
    rig = Rig(tmp_path, max_loras=1)
    a, b = await rig.load("a"), await rig.load("b")
    held = await rig.store.lease(a)
    turn = AdapterTurn()
    waiting = asyncio.create_task(rig.store.lease(b, turn))
    await asyncio.sleep(0)
    assert rig.store.num_waiting == 1
    turn.give_up()
    with pytest.raises(Cancelled):
        await waiting
    assert rig.store.num_waiting == 0
    assert rig.store.lease_now(a) is not None
    held.release()


async def test_a_stream_that_ends_while_its_adapter_is_read_takes_no_room(tmp_path: Path) -> None:
    rig = Rig(tmp_path, max_loras=1)
    a, b = await rig.load("a"), await rig.load("b")
    assert rig.in_memory == {"b"}
    rig.source.may_read.clear()
    turn = AdapterTurn()
    reading = asyncio.create_task(rig.store.lease(a, turn))
    await asyncio.sleep(0)
    turn.give_up()
    rig.source.may_read.set()
    with pytest.raises(Cancelled):
        await reading
    assert (rig.store.num_active, rig.store.num_waiting) == (0, 0)
    assert (await rig.store.lease(b)).adapter.content_hash == "b"


async def test_a_stream_keeps_what_it_began_with(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    old = await rig.load("a", "one")
    lease = await rig.store.lease(old)
    with pytest.raises(Conflict, match="load_inplace"):
        await rig.load("a", "two")
    new = await rig.load("a", "two", in_place=True)
    assert lease.adapter.content_hash == "one"
    assert (await rig.store.lease(new)).adapter.content_hash == "two"
    with pytest.raises(Unavailable, match="another content"):
        rig.store.find("a", "one")
    assert rig.store.unload("a")
    assert not rig.store.unload("a")
    lease.release()
    assert rig.store.num_resident == 1


async def test_the_same_content_is_there_already(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    await rig.load("a")
    assert (await rig.store.load("a", rig.write("a"), version=7))[1]
    assert rig.store.version_of("a") == 7


async def test_files_that_have_changed_are_not_served_as_what_they_were(tmp_path: Path) -> None:
    rig = Rig(tmp_path, max_loras=1)
    a = await rig.load("a")
    await rig.load("b")
    rig.write("a", "other")
    with pytest.raises(Unavailable, match="have changed"):
        await rig.store.lease(a)


async def test_loading_has_a_deadline_and_a_bound(tmp_path: Path) -> None:
    rig = Rig(tmp_path, load_timeout_s=0.5, max_adapters=1)
    rig.source.may_read.clear()
    with pytest.raises(Unavailable, match=r"not read within 0.5 s"):
        await rig.load("a")
    rig.source.may_read.set()
    await rig.load("a")
    with pytest.raises(Overloaded, match="this worker has 1 adapters"):
        await rig.load("b")


async def test_a_failed_load_leaves_the_name_as_it_was(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    with pytest.raises(InvalidInput, match="it is bad"):
        await rig.load("a", "bad")
    assert rig.store.cards() == []
    static = Rig(tmp_path, lora_modules=[f"a={tmp_path / 'a'}"])
    with pytest.raises(ConfigError, match="the adapter a cannot be served: it is bad"):
        await static.store.load_modules()


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("/etc", Forbidden),
        ("{root}/in/../../etc", Forbidden),
        ("{root}/out", Forbidden),
        ("{root}x", Forbidden),
        ("{root}/missing", InvalidInput),
        ("{root}/file", InvalidInput),
        ("\0", InvalidInput),
        ("", NotFound),
    ],
)
def test_paths_outside_of_the_allowed_ones_are_refused(
    tmp_path: Path, path: str, error: type[TokenMeshError]
) -> None:
    root = tmp_path / "root"
    (root / "in").mkdir(parents=True)
    (root / "file").touch()
    (root / "out").symlink_to("/etc")
    (tmp_path / "rootx").mkdir()
    directories = AdapterDirectories(LoraSettings(allowed_dirs=[str(root)]))
    assert directories.locate("x", f"{root}/in") == root / "in"
    with pytest.raises(error):
        directories.locate("x", path.format(root=root))


@pytest.mark.parametrize("name", ["lost", "..", ".", "a/..", "/etc", "a//b", "out"])
def test_names_resolve_within_their_directory_only(tmp_path: Path, name: str) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "out").symlink_to("/etc")
    directories = AdapterDirectories(LoraSettings(lora_dir=str(tmp_path)))
    assert directories.locate("a", "") == tmp_path / "a"
    assert directories.locate("a/b", "") == tmp_path / "a" / "b"
    with pytest.raises(NotFound):
        directories.locate(name, "")


def test_files_that_are_links_out_of_the_allowed_directories_are_refused(tmp_path: Path) -> None:
    """A snapshot of Hugging Face's cache consists of links to its blobs."""
    cache, outside = tmp_path / "cache", tmp_path / "outside"
    outside.touch()
    blob = cache / "blobs" / "1"
    blob.parent.mkdir(parents=True)
    blob.touch()
    for name, target in (("snapshot", blob), ("evil", outside)):
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            link = cache / "snapshots" / name / file
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(target)
    snapshots = cache / "snapshots"
    allowed = AdapterDirectories(LoraSettings(allowed_dirs=[str(cache)], lora_dir=str(snapshots)))
    assert allowed.locate("a", str(snapshots / "snapshot")) == snapshots / "snapshot"
    assert allowed.locate("snapshot", "") == snapshots / "snapshot"
    with pytest.raises(Forbidden, match="a link out"):
        allowed.locate("a", str(snapshots / "evil"))
    with pytest.raises(NotFound):
        allowed.locate("evil", "")
    inner = AdapterDirectories(LoraSettings(allowed_dirs=[str(snapshots)]))
    with pytest.raises(Forbidden, match="a link out"):
        inner.locate("a", str(snapshots / "snapshot"))
    # what the operator has named is trusted
    modules = {"a": str(snapshots / "snapshot")}
    named = AdapterDirectories(LoraSettings(lora_modules=modules))
    assert named.locate("a", modules["a"]) == snapshots / "snapshot"


async def test_requests_name_adapters(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    await rig.load("a")

    def generate(lora: str | None, lora_hash: str = "") -> Generate:
        return Generate(
            request_id=RequestId("r"),
            model=ModelName("m"),
            gateway=GatewayId("g"),
            stream=1,
            epoch=1,
            prompt_ids=b"",
            sampling=SamplingParams(seed=0, max_tokens=1),
            lora=lora,
            lora_hash=lora_hash,
        )

    assert adapter_of(rig.store, generate(None)) is None
    assert adapter_of(rig.store, generate("a", "a")) == Adapter("a", "a")
    with pytest.raises(NotFound):
        adapter_of(rig.store, generate("b"))
    with pytest.raises(InvalidInput, match="--enable-lora is off"):
        adapter_of(None, generate("a"))


def test_an_adapter_that_the_settings_name_may_be_in_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, ...]] = []

    def fetch(name: str, revision: str | None, *patterns: str) -> Path:
        asked.append((name, *patterns))
        return tmp_path

    monkeypatch.setattr(directories, "locate_model", fetch)
    known = AdapterDirectories(LoraSettings(lora_modules={"sql": "someone/sql-adapter"}))
    assert known.locate("sql", "someone/sql-adapter") == tmp_path
    assert asked == [("someone/sql-adapter", "adapter_config.json", "adapter_model.safetensors")]
    with pytest.raises(Forbidden):
        known.locate("other", "someone/other-adapter")
    assert len(asked) == 1

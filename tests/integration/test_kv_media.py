"""KV from another worker, of prompts with media and of prompts that are embeddings.

Each draws the tokens of a prompt that is computed where it is decoded; what stands at the same
places of another prompt is never taken for it.
"""

from pathlib import Path

import msgspec
import pytest
import torch

from tests.engine.test_media_families import image_family
from tests.fakes.kv_workers import PROMPT, SIZE, KvWorkers, Pair
from tests.fakes.media_family import several
from tests.fakes.models import make_model
from tests.rounds import some
from tokenmesh.shared.blobs import content_key
from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.messages.media import EMBEDS, IMAGE, MediaItem
from tokenmesh.shared.tensor_blob import TensorBlob

FAMILIES = ("embeds", "llava", "qwen2_5_vl", "qwen3_vl", "gemma3")

Prompt = tuple[list[int], list[MediaItem], dict[str, TensorBlob]]


def prompts_of(name: str, folder: Path) -> list[Prompt]:
    """Two prompts of equal tokens and different media; the checkpoint is in the folder."""
    if name == "embeds":
        return prompts_of_embeddings(folder)
    job = image_family(folder, name).job(several(IMAGE, 1, 2))
    ids, first, last = [*job.prompt, *PROMPT[:20]], job.media[0], job.media[-1]
    # under the same tokens, an image like the last one but for its rows, which are turned
    other = msgspec.structs.replace(last, content_hash="other")
    embeddings = dict(job.embeddings)
    rows = torch.frombuffer(bytearray(embeddings[last.content_hash].data), dtype=torch.float32)
    blob = embeddings[last.content_hash]
    embeddings["other"] = TensorBlob(
        blob.dtype, blob.shape, rows.view(blob.shape).flip(0).numpy().tobytes()
    )
    return [(ids, [first, last], embeddings), (ids, [first, other], embeddings)]


def prompts_of_embeddings(folder: Path) -> list[Prompt]:
    """Tokens, a tensor of 50 rows, tokens."""
    model = make_model("llama")
    model.save_pretrained(folder)
    ids = [*PROMPT[:11], *([0] * 50), *PROMPT[61:]]
    found = []
    for at in range(2):
        noise = torch.Generator().manual_seed(at)
        rows = torch.randn(50, model.config.hidden_size, generator=noise)
        # the second begins like the first: only what follows differs
        rows[:20] = 0.1
        blob = TensorBlob("float32", tuple(rows.shape), rows.numpy().tobytes())
        key = f"tensor {at}"
        found.append(
            (ids, [MediaItem(kind=EMBEDS, content_hash=key, offset=11, length=50)], {key: blob})
        )
    return found


async def stored(p: Pair, prompt: Prompt) -> tuple[list[int], list[MediaItem]]:
    """Return the prompt as workers get it, once its embeddings are where they look for them."""
    ids, media, embeddings = prompt
    items = []
    for item in media:
        data = embeddings[item.content_hash].encode()
        key = content_key(data)
        await p.source.mesh.blobs.put(data)
        items.append(msgspec.structs.replace(item, embeddings=key))
    return ids, items


@some(FAMILIES, ("embeds", "qwen3_vl"))
async def test_prompts_with_media_are_the_same_wherever_their_kv_comes_from(
    name: str,
    tmp_path: Path,
    bus: MessageBus,
    bus_settings: BusSettings,
    redis_settings: RedisSettings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = prompts_of(name, tmp_path)
    workers = KvWorkers(tmp_path, bus, bus_settings, redis_settings, monkeypatch)
    more = {"num_gpu_blocks_override": 300, "max_num_batched_tokens": 64}
    async with workers.sides(2, {"role": "both"}, **more) as p:
        expected = []
        for prompt in (first, second):
            ids, media = await stored(p, prompt)
            tokens, _ = await p.run(p.source, ids, media=media, cache_salt="alone")
            expected.append(tokens)
        assert expected[0] != expected[1]
        ids, media = await stored(p, first)
        # computed for this stream: nothing of it was cached
        got = await p.run(p.reader, ids, media=media, kv=p.source.origin())
        assert got == (expected[0], 0)
        assert p.reader.computed <= 2 * SIZE
        ids, media = await stored(p, second)
        before = p.source.computed
        assert (await p.run(p.source, ids, media=media))[0] == expected[1]
        # what stands before the media that differ is the same
        assert len(ids) // 4 < p.source.computed - before < len(ids)
        at_source, at_reader = p.source.computed, p.reader.computed
        origin = p.source.origin(computes=False)
        tokens, cached = await p.run(p.reader, ids, media=media, kv=origin)
        assert tokens == expected[1]
        assert cached >= len(ids) - 2 * SIZE
        assert p.source.computed == at_source
        assert p.reader.computed - at_reader == len(ids) - cached

"""Kinds of models and of streams whose KV comes from another worker and from disk.

Each draws the tokens, and says the logprobs, of a prompt that is computed where it is decoded. What
gateways make of streams (several choices, tools, grammars, batches) is in `benchmarks.chaos
--prefill-workers`.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_gguf import bytes_tokens
from tests.fakes.adapters import AdapterSpec, write_adapter
from tests.fakes.general_models import GENERAL, make_general
from tests.fakes.gguf import plain, write_model
from tests.fakes.kv_workers import PROMPT, KvWorkers, Pair
from tests.fakes.models import make_model
from tests.rounds import some
from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.messages.place import KvOrigin
from tokenmesh.shared.tokens import pack_ids, unpack_ids

FAMILIES = (
    *("llama", "qwen3_moe", "deepseek_v3", "gpt_oss", "gemma3_text", "gguf", "adapters"),
    # prompts longer than its original length have other keys than short ones
    "phi3_longrope_short",
)
GREEDY = {"temperature": 0.0}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"sampling": GREEDY},
    "sampled": {},
    "of another seed": {"sampling": {"seed": 77, "top_p": 0.9, "min_p": 0.01}},
    "penalized": {"sampling": {"frequency_penalty": 1.5, "repetition_penalty": 1.2}},
    "with logprobs": {"sampling": {"logprobs": 3}},
    "with logprobs of its prompt": {"sampling": {"prompt_logprobs": 2}},
    "salted": {"cache_salt": "tenant"},
    "moved": {"output_ids": pack_ids([9, 8, 7])},
}


def write_checkpoint(name: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """A tiny model of a family, and further settings of its workers."""
    make = make_general if name in GENERAL else make_model
    model = make("llama" if name in ("gguf", "adapters") else name)
    if name == "gguf":
        model.resize_token_embeddings(320)
    model.save_pretrained(folder / "model")
    if name == "gguf":
        path = folder / "model.gguf"
        tokens = bytes_tokens(320)
        write_model(folder / "model", path, "llama", lambda _, weight: plain(weight), tokens)
        return path, {}
    if name != "adapters":
        return folder / "model", {}
    adapter = write_adapter(model, folder / "static", AdapterSpec())
    return folder / "model", {"lora": {"enable_lora": True, "lora_modules": [f"static={adapter}"]}}


async def answer(
    p: Pair, side: Any, prompt: list[int], origin: KvOrigin | None = None, **fields: Any
) -> tuple[object, int]:
    """Return what a client hears, and how many tokens of the prompt are said to be cached."""
    found = await p.finish(await p.begin(side, prompt, kv=origin, **fields))
    assert found[-1].error is None, found[-1].error
    tokens = [token for each in found for token in unpack_ids(each.token_ids)]
    logprobs = [(each.token_id, each.rank) for delta in found for each in delta.logprobs or ()]
    of_prompt = [each and each.token_id for each in found[0].prompt_logprobs or ()]
    assert found[0].cached_tokens is not None
    return (tokens, logprobs, of_prompt, found[-1].finish), found[0].cached_tokens


@some(FAMILIES, ("gpt_oss",))
async def test_streams_of_all_kinds_are_the_same_wherever_their_kv_comes_from(
    name: str,
    tmp_path: Path,
    bus: MessageBus,
    bus_settings: BusSettings,
    redis_settings: RedisSettings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint, more = write_checkpoint(name, tmp_path)
    workers = KvWorkers(checkpoint, bus, bus_settings, redis_settings, monkeypatch)
    workers.model_impl = "transformers" if name in GENERAL else "auto"
    kv = {"role": "both", "disk_dir": str(tmp_path / "kv"), "disk_size": 0.02}
    more |= {"num_gpu_blocks_override": 200}
    kinds = dict(KINDS)
    if name == "adapters":
        kinds |= {"of an adapter": {"lora": "static"}}
    prompts = {kind: [(each + at) % 90 + 3 for each in PROMPT] for at, kind in enumerate(kinds)}
    expected = {}
    async with workers.sides(2, kv, **more) as p:
        for kind, fields in kinds.items():
            alone = {**fields, "cache_salt": f"alone {kind}"}
            expected[kind], _ = await answer(p, p.source, prompts[kind], **alone)
        for kind, fields in kinds.items():
            before = p.reader.computed
            heard, cached = await answer(p, p.reader, prompts[kind], p.source.origin(), **fields)
            assert (kind, heard) == (kind, expected[kind])
            # computed for this stream: nothing of it was cached
            assert (kind, cached) == (kind, 0)
            whole = "prompt_logprobs" in fields.get("sampling", {})
            assert (p.reader.computed - before < len(PROMPT) // 2) != whole, kind
    async with workers.sides(1, kv, **more) as p:
        for kind, fields in kinds.items():
            heard, cached = await answer(p, p.reader, prompts[kind], **fields)
            assert (kind, heard) == (kind, expected[kind])
            if "prompt_logprobs" not in fields.get("sampling", {}):
                assert cached >= len(PROMPT) // 2, kind

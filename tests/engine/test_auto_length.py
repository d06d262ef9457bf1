"""`max_model_len` auto: the longest context that the KV memory holds for one request."""

from typing import Any

import pytest

from tests.fakes.engine_driver import EngineDriver, Job, greedy, load
from tests.fakes.tiny import Tiny, prompt_of
from tokenmesh.services.worker_svc.admission import admit
from tokenmesh.services.worker_svc.load import LoadBook
from tokenmesh.services.worker_svc.main import card_of
from tokenmesh.shared.errors import ConfigError, PromptTooLong
from tokenmesh.shared.ids import GatewayId, ModelName, RequestId
from tokenmesh.shared.messages.generate import Generate
from tokenmesh.shared.tokens import pack_ids

SIZES: dict[str, Any] = {"max_num_batched_tokens": 8, "max_num_seqs": 2}


def ask(num_prompt: int, max_tokens: int) -> Generate:
    return Generate(
        request_id=RequestId("r"),
        gateway=GatewayId("g"),
        stream=1,
        epoch=1,
        model=ModelName("m"),
        prompt_ids=pack_ids([5] * num_prompt),
        sampling=greedy(max_tokens),
    )


@pytest.mark.parametrize(
    ("name", "num_blocks", "longest"),
    [
        ("llama", 8, 7 * 16),
        ("llama", 200, 256),
        # five of six layers see 16 positions, and hold 3 blocks at most where chunks have 8 tokens
        ("gemma3_text", 17, 2 * 16),
        ("gemma3_text", 20, 4 * 16),
        pytest.param("gemma3_text", 25, 9 * 16, marks=pytest.mark.slow),
        ("deepseek_v2", 8, 7 * 16),
        ("bamba", 8, 7 * 16),
        ("mamba2", 8, 7 * 16),
    ],
)
def test_the_pool_bounds_the_length(tiny: Tiny, name: str, num_blocks: int, longest: int) -> None:
    sizes = {**SIZES, "num_gpu_blocks_override": num_blocks}
    driver = EngineDriver(tiny(name).directory, max_model_len="auto", **sizes)
    assert card_of((ModelName("m"),), driver.model).max_model_len == longest
    (outcome,) = driver.run([Job(prompt_of(longest - 2), greedy(2))])
    assert (outcome.error, len(outcome.token_ids)) == (None, 2)
    assert admit(ask(longest - 2, 2), driver.model, 16).spec.max_len == longest
    with pytest.raises(PromptTooLong, match=f"context holds {longest}"):
        admit(ask(longest - 2, 3), driver.model, 16)
    if longest < 256:
        with pytest.raises(ConfigError, match=f"lower max_model_len to {longest}"):
            load(tiny(name).directory, max_model_len=longest + 1, **sizes)


@pytest.mark.parametrize(
    ("name", "num_groups"),
    [("llama", 1), ("gemma3_text", 6), ("deepseek_v2", 1), ("bamba", 1), ("mamba2", 1)],
)
def test_bytes_that_are_reported_are_those_of_the_store(
    tiny: Tiny, name: str, num_groups: int
) -> None:
    sizes = {**SIZES, "num_gpu_blocks_override": 100, "max_num_seqs": 3}
    driver = EngineDriver(tiny(name).directory, max_model_len="auto", **sizes)
    model = driver.model
    store, book = model.resident._store, LoadBook.of(driver.settings, model)
    # the null block, and the row that padding writes to, hold no request
    spare = model.kv_bytes.block + model.kv_bytes.row
    total = sum(book.kv_bytes(of_rows=each, in_use=False) for each in (False, True))
    assert total + spare == store.nbytes
    assert store.has_states == (model.kv_bytes.row > 0)
    assert book.cache_config["enable_prefix_caching"] == "True"
    stats = []
    driver.on_output = lambda output: stats.append(output.stats)  # type: ignore[method-assign]
    driver.run([Job(prompt_of(20), greedy(4))])
    # 23 tokens are computed, in two blocks of each group
    assert max(each.kv_blocks_used for each in stats) == 2 * num_groups


def test_latents_are_counted_by_their_bytes(tiny: Tiny) -> None:
    # three layers of 16 tokens in a block, with a latent of 16 and a key of 8 in float32
    block = 3 * 16 * (16 + 8) * 4
    sizes = {**SIZES, "num_gpu_blocks_override": None, "kv_cache_memory_bytes": 5 * block + 1}
    model, _ = load(tiny("deepseek_v2").directory, max_model_len="auto", **sizes)
    assert model.max_model_len == 4 * 16


def test_where_rows_keep_states_alone_the_length_is_the_models(tiny: Tiny) -> None:
    sizes = {**SIZES, "num_gpu_blocks_override": None}
    directory = tiny("mamba2").directory
    with pytest.raises(ConfigError, match="raise kv_cache_memory_bytes to") as error:
        load(directory, max_model_len="auto", kv_cache_memory_bytes=1, **sizes)
    enough = int(error.value.message.split("kv_cache_memory_bytes to ")[1].split()[0])
    model, _ = load(directory, max_model_len="auto", kv_cache_memory_bytes=enough, **sizes)
    assert model.max_model_len == 256
    with pytest.raises(ConfigError, match=f"to {enough} or lower max_num_seqs$"):
        load(directory, max_model_len="auto", kv_cache_memory_bytes=enough - 1, **sizes)

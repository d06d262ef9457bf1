"""Native decoders whose layers with a window have separate block tables.

A page that is free holds NaN before each run.
"""

from pathlib import Path

import pytest
import torch

from tests.engine.test_general_kind import poison
from tests.engine.test_promotion import tree_of
from tests.fakes.engine_driver import EngineDriver, Job, greedy
from tests.fakes.general_models import GENERAL, make_general
from tests.fakes.tiny import Tiny, prompt_of
from tests.ops.native import WAYS
from tokenmesh.engine.exec.memory import need_of
from tokenmesh.engine.kv.block_pool import KvGroups
from tokenmesh.engine.models.keeps import one_group
from tokenmesh.engine.models.native.decoder import Decoder
from tokenmesh.engine.models.promotion.promote import promote
from tokenmesh.shared.config.worker import WorkerSettings

NUM_TOKENS = 40
CHUNK = 32
LENGTHS = (150, 120, 14, 13, 12, 15)
WINDOWS = {
    "gemma3_text": (None, *[16] * 5),
    "gpt_oss": (None, 16),
    "ministral": (None, *[7] * 2),
    "exaone4": (None, *[10] * 3),
    "olmo3": (None, *[8] * 3),
}
"""The windows of each group. The first two are promoted."""


def marks_of(name: str, native: bool) -> list[pytest.MarkDecorator]:
    """`make test` runs three of them; between them they run every line that all do."""
    is_quick = name in (("gemma3_text", "olmo3") if native else ("gpt_oss",))
    return [] if is_quick else [pytest.mark.slow]


@pytest.mark.parametrize(
    ("name", "native"),
    [
        pytest.param(
            name,
            *way.values,
            marks=[*way.marks, *marks_of(name, bool(way.values[0]))],
            id=f"{name}-{way.id}",
        )
        for name in WINDOWS
        for way in WAYS
    ],
)
def test_long_prompts_get_the_tokens_of_transformers_in_a_pool_for_windows(
    tiny: Tiny, name: str, native: bool
) -> None:
    driver = EngineDriver(
        tiny(name).directory,
        model_impl="transformers" if name in GENERAL else "auto",
        native_kernels=native,
        max_num_batched_tokens=CHUNK,
        max_num_seqs=len(LENGTHS),
    )
    resident = driver.model.resident
    assert isinstance(resident._model, Decoder)
    assert resident._model.has_program == native
    windows = driver.model.runner.windows
    assert windows == WINDOWS[name]
    groups = KvGroups.of(
        windows, driver.settings.block_size, driver.settings.max_num_batched_tokens
    )
    longest = LENGTHS[0] + NUM_TOKENS
    num_blocks = 1 + groups.needed(longest)
    # nothing but blocks that were freed lets the longest end
    assert num_blocks < len(windows) * groups.blocks_of(longest)
    prompts = [prompt_of(length, seed=length) for length in LENGTHS]
    jobs = [Job(prompt, greedy(NUM_TOKENS)) for prompt in prompts]
    for chosen, chunk in (([0], CHUNK), ([0], 7), ([0, 1], 19), ([5, 4, 3, 2, 1, 0], CHUNK)):
        with torch.inference_mode():
            poison(resident._store)
        engine = driver.again(num_blocks=num_blocks, max_num_batched_tokens=chunk)
        outcomes = engine.run([jobs[i] for i in chosen])
        assert [each.error for each in outcomes] == [None] * len(chosen)
        tokens = [each.token_ids for each in outcomes]
        assert tokens == tiny(name).greedy([prompts[i] for i in chosen], NUM_TOKENS, tokens)
    assert sum(each.num_preemptions for each in outcomes) > 0


@torch.inference_mode()
def test_a_promoted_gemma_3_needs_less_than_a_third_of_one_tables_memory(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 26, "sliding_window": 512, "max_position_embeddings": 32768}
    make_general("gemma3_text", sizes).save_pretrained(tmp_path)
    decoder = promote(tree_of(tmp_path), False)
    settings = WorkerSettings(max_num_batched_tokens=2048)
    ours, one_table = (
        need_of(decoder.keeps, grouping, settings, torch.bfloat16, 32768, can_save=False)
        for grouping in (decoder.grouping, one_group(decoder.keeps))
    )
    assert 4 < one_table.num_bytes / ours.num_bytes < 5

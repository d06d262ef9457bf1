"""The plan for the memory has a part for what rows keep until their drafts are verified."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.engine_driver import EngineDriver
from tests.fakes.tiny import Tiny
from tokenmesh.engine.exec.runner import TorchRunner
from tokenmesh.engine.speculate.proposer import make_proposer
from tokenmesh.shared.config.speculative import SpeculativeConfig

NUM_ROWS = 24


def planned(directory: Path, config: Mapping[str, Any]) -> EngineDriver:
    """An engine whose memory for KV is 32 MiB."""
    return EngineDriver(
        directory,
        speculative_config=config,
        max_num_seqs=NUM_ROWS,
        num_gpu_blocks_override=None,
        kv_cache_memory_bytes=32 << 20,
        enable_prefix_caching=False,
    )


def pool_bytes(driver: EngineDriver) -> int:
    return driver.model.runner.num_blocks * driver.model.kv_bytes.block


def test_copies_of_states_are_planned_for_by_the_rows_that_may_have_drafts(tiny: Tiny) -> None:
    directory = tiny("bamba").directory
    ngram = {"method": "ngram"}
    every, few = (
        planned(directory, ngram),
        planned(directory, {**ngram, "disable_by_batch_size": 3}),
    )
    asked = planned(directory, {})
    row, block = every.model.kv_bytes.row, every.model.kv_bytes.block
    # a method that a request brings: no more rows have drafts than there is memory for
    proposer = make_proposer(SpeculativeConfig(), asked.model.runner)
    assert proposer is not None
    assert proposer.max_rows == 8
    for driver, num_rows in ((few, 3), (asked, 8)):
        freed = (NUM_ROWS - num_rows) * row
        assert pool_bytes(driver) - pool_bytes(every) == pytest.approx(freed, abs=block)
    runner = every.model.runner
    assert isinstance(runner, TorchRunner)
    with torch.inference_mode():
        copies = runner._store.copies_of_rows(range(NUM_ROWS))
    assert sum(each.nbytes for each in copies) == NUM_ROWS * row


def test_probabilities_of_open_drafts_are_planned_for(tiny: Tiny) -> None:
    directory = tiny("llama").directory
    config = {"model": str(directory), "num_speculative_tokens": 64}
    same = planned(directory, config)
    apart = planned(directory, {**config, "rejection_sample_method": "probabilistic"})
    taken = NUM_ROWS * 64 * 160 * 4
    block = 2 * same.model.kv_bytes.block
    assert pool_bytes(same) - pool_bytes(apart) == pytest.approx(taken, abs=block)
    assert taken > 2 * block

"""Every family against transformers: logits, and greedy tokens whatever the chunks."""

import pytest
import torch

from tests.fakes.engine_driver import EngineDriver, Job, greedy, load
from tests.fakes.models import FAKES
from tests.fakes.tiny import Tiny, TinyCheckpoint, prompt_of
from tests.ops.native import FOLDER
from tests.rounds import some
from tokenmesh.engine.exec.inputs import build_inputs
from tokenmesh.engine.exec.rows import HostRows
from tokenmesh.engine.exec.runner import TorchRunner
from tokenmesh.engine.models.checkpoint import Checkpoint
from tokenmesh.engine.models.kv_store import make_store
from tokenmesh.engine.models.native.build_decoder import build_decoder
from tokenmesh.engine.models.native.read_config import read_facts
from tokenmesh.engine.models.raw_config import read_json
from tokenmesh.engine.plan import (
    NewRow,
    ScheduledRow,
    StepPlan,
)
from tokenmesh.kernels import native as native_kernels

ATOL = 2e-4
NUM_TOKENS = 32
WHOLE = 1024
EVERY_LINE = frozenset(
    {"llama_dynamic", "ministral3", "qwen2_window", "olmo3", "phi3_longrope_short"}
)
"""With the logits of all families they run every line and branch of ours that all of them run."""


def all_logits(checkpoint: TinyCheckpoint, prompt: list[int], native: bool) -> torch.Tensor:
    """Our logits at every position of a prompt that is computed in one chunk."""
    facts = read_facts(read_json(checkpoint.directory / "config.json"))
    weights = Checkpoint(checkpoint.directory)
    with torch.inference_mode():
        decoder = build_decoder(facts, weights, torch.float32, lambda done, total: None, native)
        cpu, grouping = torch.device("cpu"), decoder.grouping
        num_windowed = len(grouping.windows) - 1
        num_blocks = 8 * (1 + num_windowed)
        store = make_store(decoder.keeps, num_blocks, 16, 1, torch.float32, cpu, grouping)
        store.clear_blocks(torch.arange(num_blocks))
        rows = HostRows(1, 8, facts, num_windowed)
        rows.add(NewRow(0, prompt, len(prompt), greedy(1), [], False))
        blocks = [3, 7, 1, 5]
        windowed = [[shift + block for block in blocks] for shift in range(8, num_blocks, 8)]
        entry = ScheduledRow(0, 0, len(prompt), blocks, samples=True, new_windowed=windowed)
        rows.schedule(entry)
        inputs = build_inputs([entry], rows, 16)
        hidden = decoder.forward(decoder.embed(inputs.token_ids), inputs.step, store)
        return decoder.logits(hidden)


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("name", FAKES)
def test_logits_equal_those_of_transformers(tiny: Tiny, name: str, native: bool) -> None:
    if native and not native_kernels.start(1, 0, FOLDER):
        pytest.skip("no C kernels on this machine")
    prompt = prompt_of(50)
    expected = tiny(name).logits(prompt)
    assert expected.std() > 1.0
    torch.testing.assert_close(all_logits(tiny(name), prompt, native), expected, atol=ATOL, rtol=0)


@pytest.mark.parametrize("name", ["llama", "qwen2_window", "qwen3", "olmo3", "ministral3"])
def test_greedy_tokens_of_torch_kernels_equal_those_of_transformers(tiny: Tiny, name: str) -> None:
    prompt = prompt_of(37, seed=1)
    for chunk in (7, WHOLE):
        driver = EngineDriver(
            tiny(name).directory, max_num_batched_tokens=chunk, native_kernels=False
        )
        tokens = driver.tokens([Job(prompt, greedy(NUM_TOKENS))])
        assert tokens == tiny(name).greedy([prompt], NUM_TOKENS, tokens), f"chunks of {chunk}"


@some(FAKES, EVERY_LINE)
def test_greedy_tokens_equal_those_of_transformers_in_any_chunks(tiny: Tiny, name: str) -> None:
    prompt = prompt_of(37, seed=1)
    for chunk in (1, 3, 7, 16, WHOLE):
        driver = EngineDriver(tiny(name).directory, max_num_batched_tokens=chunk)
        tokens = driver.tokens([Job(prompt, greedy(NUM_TOKENS))])
        assert tokens == tiny(name).greedy([prompt], NUM_TOKENS, tokens), f"chunks of {chunk}"


def test_one_token_prompts_work(tiny: Tiny) -> None:
    expected = tiny("llama").greedy([[9]], NUM_TOKENS)
    assert EngineDriver(tiny("llama").directory).tokens([Job([9], greedy(NUM_TOKENS))]) == expected


def test_prompts_longer_than_a_query_tile_and_many_pages_match(tiny: Tiny) -> None:
    checkpoint = tiny("mistral_long")
    prompt = prompt_of(1100)
    expected = checkpoint.greedy([prompt], 8)
    for chunk in (2000, 700):
        driver = EngineDriver(checkpoint.directory, max_num_batched_tokens=chunk, block_size=8)
        assert driver.tokens([Job(prompt, greedy(8))]) == expected, f"chunks of {chunk}"


def test_bfloat16_logits_are_close_to_float32(tiny: Tiny) -> None:
    plan = StepPlan(
        step=0,
        new_rows=[NewRow(0, prompt_of(20), 20, greedy(1), [], False)],
        scheduled=[ScheduledRow(0, 0, 20, [1, 2], samples=True)],
    )
    logits = []
    for dtype in ("float32", "bfloat16"):
        loaded, _ = load(tiny("qwen3").directory, dtype=dtype)
        runner = loaded.runner
        assert isinstance(runner, TorchRunner)
        with torch.inference_mode():
            step = runner.forward(runner.prepare(plan))
        assert step.sampled is not None
        logits.append(step.sampled)
    assert loaded.dtype == "bfloat16"
    error = (logits[0] - logits[1]).abs().max() / logits[0].abs().max()
    assert 1e-5 < error < 0.05

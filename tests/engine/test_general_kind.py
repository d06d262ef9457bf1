"""Every family that runs as transformers' module tree, against transformers.

A page that is free and a state of a free row hold NaN before each test.
"""

from collections.abc import Callable, Sequence
from typing import Final, NoReturn

import pytest
import torch

from tests.fakes.engine_driver import EngineDriver, Job, Outcome, greedy
from tests.fakes.family_table import parts, table
from tests.fakes.general_models import GENERAL, STATES
from tests.fakes.models import FAKES
from tests.fakes.tiny import Tiny, TinyCheckpoint, prompt_of
from tests.rounds import some
from tokenmesh.engine.layers.step import HostStep
from tokenmesh.engine.models.api import LanguageModel
from tokenmesh.engine.models.keeps import Latent, Pages, State
from tokenmesh.engine.models.kv_store import KvStore
from tokenmesh.engine.models.native.decoder import Decoder
from tokenmesh.engine.models.promotion.read_heads import Unread
from tokenmesh.engine.models.tree import build
from tokenmesh.engine.models.tree.attention import Port
from tokenmesh.engine.models.tree.model import HfModel

General = Callable[[str], EngineDriver]

ATOL: Final = 2e-4
STATE_ATOL: Final = 1e-3
NUM_TOKENS: Final = 32
WHOLE: Final = 1024
PAGE: Final = 16
NAMES: Final = [*(name for name in FAKES if name != "mistral_long"), *GENERAL]
BY_LENGTH: Final = frozenset({"llama_dynamic", "hunyuan", "phi3_longrope_short"})
"""Keys of earlier tokens change as a sequence grows: only `generate` says what comes next."""
ONE_OF_EACH: Final = frozenset(
    {"ministral3", "gemma2", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next", "falcon_h1"}
)
EVERY_LINE: Final = ONE_OF_EACH - {"qwen3_next", "falcon_h1"} | {
    *("llama", "mistral", "olmo2", "smollm3", "granite", "phi3_longrope_short", "qwen2_moe"),
    *("olmoe", "glm4_moe", "hunyuan_v1_moe", "mamba2", "nemotron_h", "deepseek_v32", "kimi_linear"),
}
"""With the tests of `ONE_OF_EACH` they run every line and branch of ours that all families run."""
SHARED: Final = prompt_of(37, seed=5)
PROMPTS: Final = [
    SHARED,
    [*SHARED[:32], 7],
    [*SHARED[:16], 8, 9, 10],
    *(prompt_of(length, seed=length) for length in (1, 40, 17, 16, 33, 7)),
]
"""Three that share blocks, and prompts around page borders; nine make the largest batch."""


def atol_of(name: str) -> float:
    return STATE_ATOL if name in STATES else ATOL


def poison(store: KvStore) -> None:
    """Fill with NaN what no request holds; all is free."""
    for kept, tensors in zip(store.keeps, store.layers, strict=True):
        for each, tensor in zip(kept, tensors, strict=True):
            if isinstance(each, Pages):
                tensor[:, 1:] = torch.nan
            elif isinstance(each, Latent):
                tensor[1:] = torch.nan
            elif isinstance(each, State):
                tensor.fill_(torch.nan)


def poisoned(general: General, name: str) -> tuple[EngineDriver, LanguageModel, KvStore]:
    driver = general(name)
    resident = driver.model.resident
    model = resident._model
    assert model is not None
    with torch.inference_mode():
        poison(resident._store)
    return driver, model, resident._store


@torch.inference_mode()
def chunked_logits(
    model: LanguageModel, store: KvStore, prompts: Sequence[Sequence[int]], chunk: int
) -> list[torch.Tensor]:
    """[length, V] of each prompt, computed together in chunks over shuffled blocks."""
    tables = torch.tensor([[9, 4, 7, 2], [3, 8, 5, 6]])
    num_windowed = len(store.grouping.windows) - 1
    windowed = [tables + 10 * (group + 1) for group in range(num_windowed)]
    found: list[list[torch.Tensor]] = [[] for _ in prompts]
    for row in range(len(prompts)):
        store.clear_row(row)
    for start in range(0, max(map(len, prompts)), chunk):
        counts = {row: min(chunk, len(ids) - start) for row, ids in enumerate(prompts)}
        # rows of one token come first, see `build_inputs`
        rows = sorted((row for row in counts if counts[row] > 0), key=lambda row: counts[row] > 1)
        step = HostStep(
            starts=[start] * len(rows),
            counts=[counts[row] for row in rows],
            numbers=rows,
            all_tables=tables,
            page_size=PAGE,
            token_lengths=[
                max(p + 1, len(prompts[row]))
                for row in rows
                for p in range(start, start + counts[row])
            ],
            windowed_tables=windowed,
        )
        ids = [t for row in rows for t in prompts[row][start : start + counts[row]]]
        logits = model.logits(model.forward(model.embed(torch.tensor(ids)), step, store))
        pieces = torch.split(logits, [counts[row] for row in rows])
        for row, piece in zip(rows, pieces, strict=True):
            found[row].append(piece)
    return [torch.cat(each) for each in found]


def check_logits(general: General, tiny: Tiny, name: str, chunk: int) -> None:
    _, model, store = poisoned(general, name)
    prompts = [prompt_of(50), prompt_of(29, seed=1)]
    for ours, prompt in zip(chunked_logits(model, store, prompts, chunk), prompts, strict=True):
        expected = tiny(name).logits(prompt)
        assert expected.std() > 1.0
        torch.testing.assert_close(ours, expected, atol=atol_of(name), rtol=0)


@some(NAMES, EVERY_LINE)
def test_logits_in_chunks_of_seven_equal_those_of_transformers(
    general: General, tiny: Tiny, name: str
) -> None:
    check_logits(general, tiny, name, 7)


@pytest.mark.parametrize("chunk", [1, PAGE, WHOLE])
@some(NAMES, ONE_OF_EACH)
def test_logits_in_any_chunks_equal_those_of_transformers(
    general: General, tiny: Tiny, name: str, chunk: int
) -> None:
    check_logits(general, tiny, name, chunk)


def check_greedy(
    checkpoint: TinyCheckpoint, prompts: Sequence[Sequence[int]], outcomes: Sequence[Outcome]
) -> None:
    """Each token is the most likely one after those before it, by transformers."""
    assert [outcome.error for outcome in outcomes] == [None] * len(prompts)
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        tokens = outcome.token_ids
        logits = checkpoint.logits([*prompt, *tokens[:-1]])[len(prompt) - 1 :]
        assert len(tokens) == NUM_TOKENS
        assert logits.argmax(-1).tolist() == tokens


def check_tokens(
    name: str,
    checkpoint: TinyCheckpoint,
    prompts: Sequence[Sequence[int]],
    outcomes: Sequence[Outcome],
) -> None:
    if name not in BY_LENGTH:
        check_greedy(checkpoint, prompts, outcomes)
        return
    expected = checkpoint.greedy([list(prompt) for prompt in prompts], NUM_TOKENS)
    assert [outcome.token_ids for outcome in outcomes] == expected


def jobs_of(prompts: Sequence[Sequence[int]]) -> list[Job]:
    return [Job(prompt, greedy(NUM_TOKENS)) for prompt in prompts]


@some(NAMES, {"gemma2", "qwen3_moe", "deepseek_v3", "nemotron_h"})
def test_a_batch_that_shares_blocks_and_is_preempted_gets_the_tokens_of_transformers(
    general: General, tiny: Tiny, name: str
) -> None:
    driver, _, store = poisoned(general, name)
    # rows with a table for each group take more blocks
    num_blocks = 34 if len(store.grouping.windows) > 1 else 20
    engine = driver.again(
        num_blocks=num_blocks,
        max_num_batched_tokens=64,
        long_prefill_token_threshold=23,
        mamba_block_size=PAGE,
    )
    outcomes = engine.run(jobs_of(PROMPTS))
    check_tokens(name, tiny(name), PROMPTS, outcomes)
    assert sum(outcome.num_preemptions for outcome in outcomes) > 0
    # those that share are admitted in the first step, which saves the states
    is_shared = not store.has_states and name != "llama_dynamic"
    assert (max(outcome.num_cached for outcome in outcomes) > 0) == is_shared


@some(NAMES, ONE_OF_EACH)
def test_rows_share_blocks_in_the_step_that_fills_them(
    general: General, tiny: Tiny, name: str
) -> None:
    driver, _, store = poisoned(general, name)
    outcomes = driver.again(mamba_block_size=PAGE).run(jobs_of(PROMPTS[:3]))
    check_tokens(name, tiny(name), PROMPTS[:3], outcomes)
    # a state is there only when that step has ended
    is_shared = not store.has_states and name != "llama_dynamic"
    cached = [outcome.num_cached for outcome in outcomes]
    assert cached == ([0, 32, 16] if is_shared else [0, 0, 0])


@pytest.mark.parametrize("count", range(1, 10))
@some(NAMES, ())
def test_batches_of_one_to_nine_get_the_tokens_of_transformers(
    general: General, tiny: Tiny, name: str, count: int
) -> None:
    prompts = PROMPTS[-count:]
    for chunk in (1 + count, 7, PAGE, WHOLE):
        driver, _, _ = poisoned(general, name)
        engine = driver.again(max_num_batched_tokens=max(chunk, count))
        check_tokens(name, tiny(name), prompts, engine.run(jobs_of(prompts)))


@some(NAMES, {"gemma2", "qwen3_moe", "gpt_oss", "deepseek_v3", "mamba2"})
def test_a_stream_that_moves_goes_on_with_the_same_tokens(
    general: General, tiny: Tiny, name: str
) -> None:
    driver, _, _ = poisoned(general, name)
    prompts = [PROMPTS[0], PROMPTS[6]]
    first = driver.again().run(jobs_of(prompts))
    check_tokens(name, tiny(name), prompts, first)
    moved = [
        Job(prompt, greedy(NUM_TOKENS), outcome.token_ids[:known])
        for prompt, outcome, known in zip(prompts, first, (9, 20), strict=True)
    ]
    poisoned(general, name)
    again = driver.again(max_num_batched_tokens=19).run(moved)
    assert [each.token_ids for each in again] == [each.token_ids for each in first]


@some(NAMES, {"qwen3_moe", "deepseek_v3", "falcon_h1"})
def test_bfloat16_logits_are_close_to_those_of_float32(
    general: General, tiny: Tiny, name: str
) -> None:
    prompt = prompt_of(29)
    driver = EngineDriver(tiny(name).directory, model_impl="transformers", dtype="bfloat16")
    _, model, store = poisoned(lambda _: driver, name)
    ours = chunked_logits(model, store, [prompt], 7)[0]
    expected = tiny(name).logits(prompt)
    with torch.no_grad():
        theirs = tiny(name).make_oracle().bfloat16()(torch.tensor([prompt])).logits[0].float()
    modules = model.tree.body.modules() if isinstance(model, HfModel) else ()
    has_routes = any("Experts" in type(module).__name__ for module in modules) or (
        isinstance(model, Decoder) and any(layer.routing for layer in model.config.layers)
    )
    # a token that takes another expert is far off, in transformers as well: the median is not
    each = [(got - expected).norm(dim=-1) / expected.norm(dim=-1) for got in (ours, theirs)]
    error, own = (float(of.median() if has_routes else of.mean()) for of in each)
    assert 1e-4 < error < max(0.1 if has_routes else 0.03, 1.5 * own)


def test_a_window_that_is_forgotten_is_noticed(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "promote", stay_a_tree)
    driver = EngineDriver(tiny("gemma2").directory, model_impl="transformers", max_num_seqs=9)

    def general(_name: str) -> EngineDriver:
        return driver

    _, model, _ = poisoned(general, "gemma2")
    ports = [m.tokenmesh_port for m in model.tree.body.modules() if hasattr(m, "tokenmesh_port")]  # type: ignore[attr-defined]
    assert [port.window for port in ports] == [16, None, 16, None]
    assert all(isinstance(port, Port) for port in ports)
    monkeypatch.setattr(ports[0], "window", None)
    with pytest.raises(AssertionError, match="not close"):
        check_logits(general, tiny, "gemma2", 7)


def stay_a_tree(*_arguments: object) -> NoReturn:
    raise Unread("its ports are looked at")


def test_the_page_lists_the_families_that_are_compared() -> None:
    _, written, _ = parts()
    assert written == table(), "run python -m tests.fakes.family_table"

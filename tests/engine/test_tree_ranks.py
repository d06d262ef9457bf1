"""Every family that runs as a module tree, on two and four ranks: tokens and numbers of one."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from safetensors import safe_open

from tests.fakes.engine_driver import EngineDriver
from tests.fakes.family_table import parts
from tests.fakes.general_models import GENERAL, HEADS, VARIANTS, make_general
from tests.fakes.models import FAKES, Fake, config_of, make_fake
from tests.fakes.rank_runs import Pair, both, check_preemptions, check_sleep, jobs
from tests.fakes.ranks import RanksDriver
from tests.fakes.tiny import Tiny, prompt_of
from tests.rounds import some
from tokenmesh.engine.models.load import read_model_facts
from tokenmesh.engine.models.raw_config import read_config
from tokenmesh.engine.models.tree.facts import HfFacts, empty_tree
from tokenmesh.engine.models.tree.part import PROVED, TreePart
from tokenmesh.engine.ranks.ranks import Ranks
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.errors import ConfigError

NAMES: Final = [*GENERAL, *VARIANTS]
FEW: Final = {
    "qwen3_next": "2 heads of keys are not divisible by 4 ranks",
    **dict.fromkeys(("mamba2", "nemotron_h"), "^.*: n_groups of 2 is not divisible by 4 ranks"),
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid"), "mamba_n_groups of 2 is not"),
    "kimi_linear": "linear_num_heads of 2 is not divisible by 4 ranks",
}
"""Families whose fakes have fewer heads or groups than four ranks, with the reason."""
NAMED_OTHERWISE: Final = frozenset(
    (
        *("mixtral", "olmoe", "minimax_m2", "gpt_oss", "deepseek_v2", "deepseek_v3"),
        *("glm4_moe_lite", "deepseek_v32", "qwen3_next", "kimi_linear", "granitemoehybrid"),
        *("nemotron_h", "olmoe_unclipped"),
    )
)
"""Mixtures of experts whose names do not say so."""
QUICK: Final = frozenset({"gemma2", "qwen2_moe", "olmoe", "deepseek_v3", "qwen3_next", "bamba"})
"""Softcaps; a shared expert; norms over all heads; latents; two kinds of states."""
AS_TREES: Final = [each for each in FAKES if each not in ("llama_odd", "mistral_long")]
WITH_MEDIA: Final = frozenset(
    ("qwen3_vl_text", "qwen3_vl_moe_text", "qwen3_omni_moe_text", "hunyuan_vl_text")
)
"""Compared in `test_media_ranks.py`."""
MOST_OF_A_PART: Final = 0.62
"""Norms, routers and what all heads share are on both ranks."""


def facts_of(directory: Path, **model: Any) -> HfFacts:
    settings = ModelSettings(model=str(directory), **model)
    facts = read_model_facts(read_config(directory), directory, settings)
    assert isinstance(facts, HfFacts)
    return facts


def stored_names(directory: Path) -> list[str]:
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        return list(file.keys())


def num_bytes(facts: HfFacts) -> int:
    return sum(each.nbytes for each in empty_tree(facts.config, facts.kind).parameters())


@some(NAMES, QUICK)
def test_two_ranks_compute_what_one_does(tiny: Tiny, name: str) -> None:
    both(tiny(name).directory, jobs(), max_num_batched_tokens=16).close()


@some(NAMES, ())
def test_each_of_two_ranks_reads_about_half(tiny: Tiny, name: str) -> None:
    whole = facts_of(tiny(name).directory)
    part = TreePart(whole, Ranks(1, 2))
    assert num_bytes(part.facts) <= MOST_OF_A_PART * num_bytes(whole)


@some([name for name in NAMES if name not in FEW], {"mixtral"})
def test_four_ranks_repeat_the_heads_of_two(tiny: Tiny, name: str) -> None:
    both(tiny(name).directory, jobs(), 4, max_num_batched_tokens=32).close()


@pytest.mark.parametrize("name", FEW)
def test_groups_that_cannot_be_repeated_are_refused(tiny: Tiny, name: str) -> None:
    with pytest.raises(ConfigError, match=FEW[name]):
        TreePart(facts_of(tiny(name).directory), Ranks(0, 4)).check()


def test_one_group_is_on_all_ranks(tmp_path: Path) -> None:
    fake = GENERAL["bamba"]
    make_fake(replace(fake, sizes={**fake.sizes, "mamba_n_groups": 1}), HEADS).save_pretrained(
        tmp_path
    )
    both(tmp_path, jobs(), 4, max_num_batched_tokens=32).close()


MIXTURES: Final = [name for name in NAMES if "_moe" in name or name in NAMED_OTHERWISE]


@some(MIXTURES, {"qwen2_moe", "gpt_oss"})
def test_two_ranks_have_half_of_the_experts_each(tiny: Tiny, name: str) -> None:
    both(tiny(name).directory, jobs(), enable_expert_parallel=True).close()


@some([name for name in MIXTURES if name not in FEW], ())
def test_four_ranks_have_some_experts_each(tiny: Tiny, name: str) -> None:
    both(tiny(name).directory, jobs(), 4, enable_expert_parallel=True).close()


def test_experts_are_read_by_the_rank_that_has_them(tiny: Tiny) -> None:
    whole = facts_of(tiny("mixtral").directory)
    shapes = dict.fromkeys(stored_names(tiny("mixtral").directory), (1,))
    read = [
        TreePart(whole, Ranks(rank, 2, by_expert=True)).taken(dict.fromkeys(shapes), shapes)
        for rank in range(2)
    ]
    own = [{name for name in each if ".experts." in name} for each in read]
    assert len(own[0]) == len(own[1]) == 3 * 3 * 4
    assert not own[0] & own[1]


def test_experts_that_do_not_divide_are_refused_with_both_numbers(tiny: Tiny) -> None:
    part = TreePart(facts_of(tiny("mixtral").directory), Ranks(0, 3, by_expert=True))
    with pytest.raises(ConfigError, match="8 experts are not divisible by 3 ranks"):
        part.check()


@some(AS_TREES, {"olmo2"})
def test_families_of_the_native_kind_are_divided_as_trees(tiny: Tiny, name: str) -> None:
    both(tiny(name).directory, jobs(), model_impl="transformers").close()


def test_the_parts_of_two_ranks_are_all_of_each_tensor(tiny: Tiny) -> None:
    whole = facts_of(tiny("bamba").directory)
    tree = empty_tree(whole.config, whole.kind)
    shapes = {name: tuple(each.shape) for name, each in tree.state_dict().items()}
    cuts = [TreePart(whole, Ranks(rank, 2)).cuts(shapes) for rank in range(2)]
    assert len(cuts[0]) > 20
    for name in cuts[0]:
        for size, *pieces in zip(shapes[name], *(cut[name] for cut in cuts), strict=True):
            rows = [row for piece in pieces for part in piece for row in range(size)[part]]
            assert sorted(set(rows)) == list(range(size))
            assert len(rows) in (size, 2 * size)


@pytest.fixture(scope="module")
def mixture(tiny: Tiny) -> Iterator[Pair]:
    directory = tiny("qwen3_next").directory
    two = RanksDriver(directory, max_num_batched_tokens=32)
    yield EngineDriver(directory, cpu_threads=1, max_num_batched_tokens=32), two
    two.close()


def test_prefix_hits_and_preemptions_change_nothing(mixture: Pair) -> None:
    check_preemptions(mixture, prompt_of(12, 5), 8, is_found=False)  # no state is saved there


@pytest.mark.parametrize("level", [1, 2])
def test_trees_on_all_ranks_sleep_and_wake(mixture: Pair, level: int) -> None:
    check_sleep(mixture[1], level)


@pytest.mark.parametrize(
    ("name", "sizes", "world", "problem"),
    [
        ("mixtral", {}, 3, "num_attention_heads of 4 is not divisible by 3 ranks"),
        ("qwen3_moe", {"moe_intermediate_size": 23}, 2, "moe_intermediate_size of 23"),
        ("qwen2_moe", {"num_key_value_heads": 4}, 8, "num_attention_heads of 4 is not"),
        (
            "lfm2",
            {
                **{"num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 96},
                "block_auto_adjust_ff_dim": False,
            },
            *(6, "64 channels of a convolution are not divisible by 6 ranks"),
        ),
        ("gemma2", {"vocab_size": 161, "num_key_value_heads": 4}, 4, None),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_both_numbers(
    tmp_path: Path, name: str, sizes: dict[str, Any], world: int, problem: str | None
) -> None:
    fake = GENERAL[name]
    fake = replace(fake, sizes={**fake.sizes, **sizes})
    make_fake(fake, HEADS).save_pretrained(tmp_path)
    part = TreePart(facts_of(tmp_path), Ranks(0, world))
    if problem is None:
        part.check()
        return
    with pytest.raises(ConfigError, match=problem) as caught:
        part.check()
    assert caught.value.param == "worker.tensor_parallel_size"


def test_a_family_that_no_test_has_compared_is_refused_by_name(tmp_path: Path) -> None:
    make_fake(Fake("Starcoder2"), HEADS).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="has compared parts of the model type 'starcoder2'"):
        TreePart(facts_of(tmp_path), Ranks(0, 2)).check()


@pytest.mark.parametrize(
    "sizes",
    [
        {"conv_bias": True, "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.5},
        {"block_auto_adjust_ff_dim": False},
    ],
    ids=["biases", "as-it-says"],
)
def test_channels_of_short_convolutions_are_divided(tmp_path: Path, sizes: dict[str, Any]) -> None:
    fake = GENERAL["lfm2"]
    make_fake(replace(fake, sizes={**fake.sizes, **sizes}), HEADS).save_pretrained(tmp_path)
    many = both(tmp_path, jobs(), max_num_batched_tokens=16)
    one = EngineDriver(tmp_path).model.kv_bytes
    assert 2 * many.model.kv_bytes.row == one.row, "each rank keeps the states of its channels"
    many.close()


def test_a_norm_over_all_heads_names_the_kind_that_divides_it(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match="--model-impl transformers"):
        RanksDriver(tiny("olmo2").directory)


def test_each_family_of_the_page_is_divided_or_refused() -> None:
    _, page, _ = parts()
    fakes: dict[str, Fake] = {**FAKES, **GENERAL, **VARIANTS}
    families = {each.family for each in fakes.values()}
    written = {row.split("`")[1].removesuffix("ForCausalLM") for row in page.splitlines()[2:]}
    assert written <= families
    types = {config_of(each).model_type for each in fakes.values()}
    assert types == PROVED - WITH_MEDIA


def test_a_tree_whose_tensors_have_another_shape_is_refused(tmp_path: Path) -> None:
    model = make_general("mixtral")
    model.save_pretrained(tmp_path)
    raw = tmp_path / "config.json"
    raw.write_text(raw.read_text().replace('"vocab_size": 160', '"vocab_size": 158'))
    with pytest.raises(Exception, match="160"):
        RanksDriver(tmp_path)

"""Models are divided over ranks, or refused with both numbers before anything is loaded."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmesh.engine.models.native.config import DecoderConfig, LayerConfig
from tokenmesh.engine.models.native.divide import check_sizes, divided
from tokenmesh.engine.models.native.pieces import pieces_of
from tokenmesh.engine.ranks.pipe import Pipe
from tokenmesh.engine.ranks.ranks import Ranks
from tokenmesh.shared.errors import ConfigError


def config_of(**sizes: Any) -> DecoderConfig:
    fields: dict[str, Any] = {
        "vocab_size": 160,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 12,
        "num_kv_heads": 4,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "layers": (LayerConfig(None, 0),),
        "ropes": (),
        "max_position": 64,
    }
    return DecoderConfig(**{**fields, **sizes})


@pytest.mark.parametrize(
    ("sizes", "world", "expected"),
    [
        ({}, 5, "12 query heads are not divisible by 5 ranks"),
        ({"num_kv_heads": 4}, 6, "4 KV heads and 6 ranks"),
        ({"intermediate_size": 50}, 4, "an intermediate size of 50 is not divisible by 4 ranks"),
        ({"vocab_size": 5}, 4, "a vocabulary of 5 leaves nothing for one of 4 ranks"),
        ({"qk_norm": "all"}, 2, "over all 12 query heads, of which 2 ranks"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(
    sizes: dict[str, Any], world: int, expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        check_sizes(config_of(**sizes), world)
    assert caught.value.param == "worker.tensor_parallel_size"
    assert str(world) in caught.value.message


@pytest.mark.parametrize("world", [2, 4, 12])
def test_each_rank_has_the_kv_heads_that_its_query_heads_read(world: int) -> None:
    config = config_of()
    group = config.num_heads // config.num_kv_heads
    for rank in range(world):
        ranks = Ranks(rank, world)
        part = divided(config, ranks)
        queries, keys = ranks.part(config.num_heads), ranks.kv_part(config.num_kv_heads)
        assert part.num_heads == queries.stop - queries.start
        assert part.num_kv_heads == keys.stop - keys.start
        read = {head // group for head in range(queries.start, queries.stop)}
        assert read == set(range(keys.start, keys.stop))


@given(st.integers(1, 9), st.integers(1, 400))
def test_parts_of_a_vocabulary_are_all_of_it_once(world: int, size: int) -> None:
    parts = [Ranks(rank, world).padded_part(size) for rank in range(world)]
    assert [n for part in parts for n in range(part.start, part.stop)] == list(range(size))


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5))
def test_fused_and_separate_matrices_have_the_same_outputs(
    world: int, queries: int, keys: int
) -> None:
    sizes = [world * queries, world * keys, world * keys]
    everything = []
    for rank in range(world):
        ranks = Ranks(rank, world)
        taken = [ranks.part(size) for size in sizes]
        separate = pieces_of(["q", "k", "v"], sizes, taken)
        (fused,) = pieces_of(["qkv"], sizes, taken)
        firsts = {"q": 0, "k": sizes[0], "v": sizes[0] + sizes[1]}
        numbers = [n + firsts[piece.name] for piece in separate for n in piece.index.tolist()]
        assert numbers == fused.index.tolist()
        assert fused.is_whole == (world == 1)
        everything += numbers
    assert sorted(everything) == list(range(sum(sizes)))


def test_one_rank_is_not_divided() -> None:
    config = replace(config_of(), qk_norm="all")
    assert divided(config, Ranks()) is config


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 8))
def test_stages_have_the_tables_of_the_whole_model(windowed: list[bool], stages: int) -> None:
    layers = tuple(LayerConfig(8 if each else None, 0) for each in windowed)
    whole = config_of(layers=layers)
    stages = min(stages, len(layers))
    found: list[int] = []
    for stage in range(stages):
        part = divided(whole, Ranks(pipe=Pipe(stage, stages)))
        assert part.grouping.windows == whole.grouping.windows
        places = list(zip(part.grouping.group_of, part.grouping.slot_of, strict=True))
        assert len(set(places)) == len(places) == len(part.layers)
        if len(part.grouping.windows) > 1:
            own = [layer.window is not None for layer in part.layers]
            assert own == [group > 0 for group in part.grouping.group_of]
        assert max(part.grouping.group_of) < len(part.grouping.windows)
        found += range(part.first_layer, part.first_layer + len(part.layers))
    assert found == list(range(len(layers)))

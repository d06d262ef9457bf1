"""Know which part of a decoder a rank has, as a function of its config and its sizes alone."""

from dataclasses import replace
from typing import Final

from tokenmesh.engine.models.keeps import window_groups
from tokenmesh.engine.models.native.config import DecoderConfig
from tokenmesh.engine.ranks.ranks import Ranks
from tokenmesh.shared.errors import ConfigError

_PARAM: Final = "worker.tensor_parallel_size"


def check_sizes(config: DecoderConfig, world: int) -> None:
    """Raise ConfigError with both numbers where a decoder cannot be divided by `world` ranks."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    problem = None
    if heads % world:
        problem = f"{heads} query heads are not divisible by {world} ranks"
    elif kv_heads % world and world % kv_heads:
        problem = f"{kv_heads} KV heads and {world} ranks: neither is a multiple of the other"
    elif config.intermediate_size % world:
        size = config.intermediate_size
        problem = f"an intermediate size of {size} is not divisible by {world} ranks"
    elif (world - 1) * -(-config.vocab_size // world) >= config.vocab_size:
        problem = f"a vocabulary of {config.vocab_size} leaves nothing for one of {world} ranks"
    elif config.qk_norm == "all":
        what = f"its norm is over all {heads} query heads, of which {world} ranks have a part"
        problem = f"{what}; --model-impl transformers sums it over the ranks"
    if problem is not None:
        raise ConfigError(f"tensor_parallel_size {world}: {problem}", param=_PARAM)


def divided(config: DecoderConfig, ranks: Ranks) -> DecoderConfig:
    """The config of this rank's part; the vocabulary stays whole, see `Ranks.padded_part`."""
    if ranks.pipe.stages > 1:
        layers = ranks.pipe.layers(len(config.layers))
        windows = window_groups(config.keeps).windows
        own = config.layers[layers.start : layers.stop]
        config = replace(config, layers=own, first_layer=layers.start, windows=windows)
    if ranks.world == 1:
        return config
    check_sizes(config, ranks.world)
    kv_heads = ranks.kv_part(config.num_kv_heads)
    return replace(
        config,
        num_heads=config.num_heads // ranks.world,
        num_kv_heads=kv_heads.stop - kv_heads.start,
        intermediate_size=config.intermediate_size // ranks.world,
    )

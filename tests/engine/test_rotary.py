"""Tables of turns: the same bits as turning each token, however far they have grown."""

from dataclasses import replace

import pytest
import torch

from tokenmesh.engine.layers.rotary import RopeConfig, RopeKind, Rotary

CONFIG = RopeConfig("yarn", 1e4, 16, 65536, 4096, factor=4.0, attention_factor=1.1)


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
def test_a_table_grows_and_holds_what_turning_gives(kind: RopeKind) -> None:
    rotary = Rotary(replace(CONFIG, kind=kind))
    assert rotary.has_table
    for needed in (1, 7, 4096, 4097, 20000):
        table = rotary.table(needed)
        assert len(table) >= needed
        positions = torch.tensor([0, needed // 2, needed - 1])
        assert torch.equal(table[positions], rotary.turns(positions, positions + 1))


def test_a_table_is_kept_until_a_sequence_outgrows_it() -> None:
    rotary = Rotary(CONFIG)
    table = rotary.table(100)
    assert rotary.table(200) is table
    assert len(rotary.table(len(table) + 1)) == 2 * len(table)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_turns_that_depend_on_the_length_have_no_table(kind: RopeKind) -> None:
    factors = (1.0,) * 8
    config = replace(CONFIG, kind=kind, short_factor=factors, long_factor=factors)
    assert not Rotary(config).has_table


@pytest.mark.parametrize("rotary_dim", [16, 128])
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_turns_have_the_same_bits_in_batches_of_any_size(kind: RopeKind, rotary_dim: int) -> None:
    factors = tuple(1 + pair / 7 for pair in range(rotary_dim // 2))
    rotary = Rotary(
        RopeConfig(
            kind, 1e4, rotary_dim, 32, 32, factor=4.0, short_factor=factors, long_factor=factors
        )
    )
    positions = torch.arange(20, 100)
    whole = rotary.turns(positions, positions + 1)
    for size in (1, 7, 33):
        parts = [rotary.turns(part, part + 1) for part in torch.split(positions, size)]
        assert torch.equal(torch.cat(parts), whole)

"""Seeds of requests that bring none."""

from tokenmesh.shared.ids import SEED_BITS, SeedSource


def drawn(seed: int | None) -> list[int]:
    source = SeedSource(seed)
    return [source.draw() for _ in range(100)]


def test_a_fixed_seed_gives_the_same_distinct_seeds_in_every_run() -> None:
    assert drawn(7) == drawn(7)
    assert len({*drawn(7), *drawn(8)}) == 200


def test_without_one_no_two_runs_are_alike() -> None:
    assert set(drawn(None)).isdisjoint(drawn(None))


def test_seeds_fit_their_bits() -> None:
    assert all(0 <= seed < 2**SEED_BITS for seed in (*drawn(0), *drawn(None)))

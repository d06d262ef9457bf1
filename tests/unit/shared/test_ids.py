"""Seeds of requests that bring none, and numbers of spans."""

import subprocess
import sys
from itertools import pairwise

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


def test_processes_of_one_parent_count_spans_from_other_numbers() -> None:
    code = (
        "import os\n"
        "from tokenmesh.shared.ids import new_span_id\n"
        "for _ in range(3):\n"
        "    if not (child := os.fork()):\n"
        "        print(new_span_id(), flush=True)\n"
        "        os._exit(0)\n"
        "    os.waitpid(child, 0)\n"
        "print(new_span_id())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    numbers = sorted(map(int, done.stdout.split()))
    assert len(numbers) == 4
    assert all(high - low > 1 << 20 for low, high in pairwise(numbers))

"""CPU of a proposal of drafts that are looked up, by the length of the context.

`python -m benchmarks.bench_proposals` prints microseconds a row of a step: comparing its last
drafts with what was drawn, indexing that, looking up what follows, and choosing how many drafts
pay. Streams copy a passage of their context and change a tenth of its tokens (`copies`), or draw
tokens at random (`random`). Thread time of contexts in turns, the best round's medians.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from statistics import median
from time import thread_time

from tokenmesh.engine.request.request import Request
from tokenmesh.engine.request.spec import RequestSpec, StreamKey
from tokenmesh.engine.speculate.lookup import LookupProposer
from tokenmesh.shared.config.speculative import SpeculativeConfig
from tokenmesh.shared.ids import GatewayId, RequestId
from tokenmesh.shared.messages.sampling import SamplingParams

VOCABULARY = 3000
STEPS = 300
ROUNDS = 5
CHANGED = 0.1
STEP_S = 0.01
DRAFT_SHARE = 0.01
"""A step takes so much longer for each draft."""


class Stream:
    """One row, and what it draws."""

    def __init__(self, number: int, num_tokens: int, *, copies: bool) -> None:
        self._rng = Random(number)
        self._copied = num_tokens // 2 if copies else None
        spec = RequestSpec(
            key=StreamKey(GatewayId("gateway"), number, 0),
            request_id=RequestId(f"request-{number}"),
            num_prompt=num_tokens,
            sampling=SamplingParams(seed=0, max_tokens=1_000_000),
            eos_ids=frozenset(),
        )
        self.request = Request(spec, [self._rng.randrange(VOCABULARY) for _ in range(num_tokens)])

    def draw(self, drafts: Sequence[int]) -> None:
        """Append what a step with these drafts draws."""
        for place in range(len(drafts) + 1):
            token = self._drawn()
            self.request.token_ids.append(token)
            if place == len(drafts) or token != drafts[place]:
                return

    def _drawn(self) -> int:
        if self._copied is None or self._rng.random() < CHANGED:
            return self._rng.randrange(VOCABULARY)
        self._copied += 1
        return self.request.token_ids[self._copied - 1]


class Batch:
    """Rows and their proposer."""

    def __init__(self, method: str, num_rows: int, num_tokens: int, *, copies: bool) -> None:
        config = SpeculativeConfig.model_validate({"method": method})
        self._proposer = LookupProposer(config)
        self._streams = [Stream(number, num_tokens, copies=copies) for number in range(num_rows)]
        for _ in range(3):
            self._proposer.note_step(num_rows, 0, STEP_S)
        # a step indexes a part of a long prompt
        for _ in range(num_tokens // 1000):
            self._propose()

    def row_s(self) -> float:
        """One step of a row."""
        started = thread_time()
        proposed = self._propose()
        took = thread_time() - started
        for stream, drafts in zip(self._streams, proposed, strict=True):
            stream.draw(drafts)
        count = sum(map(len, proposed))
        self._proposer.note_step(len(proposed), count, STEP_S * (1 + DRAFT_SHARE * count))
        return took / len(proposed)

    def _propose(self) -> list[list[int]]:
        rows = [(stream.request, self._proposer.max_drafts) for stream in self._streams]
        return self._proposer.propose(rows, len(rows))


def microseconds(make: Callable[[int], Batch], sizes: Sequence[int]) -> dict[int, float]:
    """By length of the context."""
    rounds: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(ROUNDS):
        batches = {size: make(size) for size in sizes}
        times: dict[int, list[float]] = {size: [] for size in sizes}
        for _ in range(STEPS):
            for size, batch in batches.items():
                times[size].append(batch.row_s())
        for size in sizes:
            rounds[size].append(median(times[size]))
    return {size: round(min(medians) * 1e6, 1) for size, medians in rounds.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1_000, 100_000])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    given = parser.parse_args()
    sizes = given.contexts
    print(f"{'us of CPU a row':>22}" + "".join(f"{size:>10,}" for size in sizes) + "     ratio")
    for method in ("ngram", "suffix"):
        for kind, copies in (("copies", True), ("random", False)):
            for rows in given.rows:
                found = microseconds(partial(Batch, method, rows, copies=copies), sizes)
                line = "".join(f"{value:>10}" for value in found.values())
                ratio = found[sizes[-1]] / found[sizes[0]]
                print(f"{f'{method} {kind} {rows} rows':>22}{line}{ratio:>10.2f}")


if __name__ == "__main__":
    main()

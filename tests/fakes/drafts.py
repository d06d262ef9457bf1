"""DiceProposer: drafts that are right, wrong or right in part, as the dice say."""

from collections.abc import Callable, Sequence
from random import Random

from tokenmesh.engine.request.request import Request
from tokenmesh.engine.speculate.adaptive import StepCost


class FreeDrafts(StepCost):
    """A step takes as long with drafts as without."""

    def is_known(self, num_rows: int) -> bool:
        return True

    def factors(self, num_rows: int, numbers: range) -> list[float]:
        return [1.0] * len(numbers)


class DiceProposer:
    """Knows what each stream would draw, and spoils some of it."""

    def __init__(
        self,
        rng: Random,
        output_of: Callable[[Request], list[int]],
        vocab_size: int,
        *,
        max_drafts: int = 5,
        max_rows: int = 1000,
        share_wrong: float = 0.3,
        share_resting: float = 0.0,
    ) -> None:
        """output_of: a stream's output, past its end where that is known."""
        self._share_resting = share_resting
        self.max_drafts = max_drafts
        self.max_rows = max_rows
        self.only_predicted = False
        self.num_bytes = 0
        self.num_drafts = 0
        self._rng = rng
        self._output_of = output_of
        self._vocab_size = vocab_size
        self._share_wrong = share_wrong

    def forget(self, request: Request) -> None:
        """Nothing is kept."""

    def wants(self, request: Request) -> bool:
        return self._rng.random() >= self._share_resting

    def propose(self, rows: Sequence[tuple[Request, int]], num_rows: int) -> list[list[int]]:
        assert num_rows >= len(rows)
        return [self._of(request, limit) for request, limit in rows]

    def note_step(self, num_rows: int, num_drafts: int, duration_s: float) -> None:
        """Its drafts do not depend on it."""

    def _of(self, request: Request, limit: int) -> list[int]:
        rng = self._rng
        assert limit >= 1
        coming = self._output_of(request)[request.num_known - request.num_prompt :]
        # more than is asked for is cut
        drafts = coming[: rng.randint(0, limit + 1)]
        drafts += [rng.randrange(self._vocab_size) for _ in range(rng.randrange(3))]
        if drafts and rng.random() < self._share_wrong:
            place = rng.randrange(len(drafts))
            drafts[place] = (drafts[place] + 1) % self._vocab_size
        self.num_drafts += len(drafts[:limit])
        return drafts

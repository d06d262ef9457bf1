"""Where drafts come from, and which runners can verify them."""

from collections.abc import Sequence
from typing import Protocol

from tokenmesh.engine.request.request import Request
from tokenmesh.engine.runner import Runner
from tokenmesh.shared.errors import ConfigError


class Proposer(Protocol):
    """Guesses what streams go on with. Wrong guesses cost time and change no token.

    The engine thread makes all calls, between two launches, so what they take is added to each
    step: a call may neither block nor wait. No step is in flight that draws for the request.
    """

    max_rows: int
    """With more running requests than this, all of them decode without drafts."""
    max_drafts: int
    """It bounds the drafts of one row in one step."""
    only_predicted: bool
    """It tells whether it has drafts for requests with a prediction only: it is not called before
    one."""

    @property
    def num_bytes(self) -> int:
        """Memory of what is kept of the streams."""

    def wants(self, request: Request) -> bool:
        """Return whether the request is asked for drafts in the next step. One that is not decodes
        as it does without drafts; then a step may be in flight that draws for it."""

    def propose(self, rows: Sequence[tuple[Request, int]], num_rows: int) -> list[list[int]]:
        """For each request ids of the vocabulary that may follow its known tokens, in order, at
        most as many as stand with it, which is at least 1.

        Asked once a step for all rows that have room for any; `num_rows` is how many the step has.
        """

    def note_step(self, num_rows: int, num_drafts: int, duration_s: float) -> None:
        """A step without tokens of prompts took so long."""

    def forget(self, request: Request) -> None:
        """The request has ended: drop what is kept of it. It may never have been asked for."""


def check_drafts(runner: Runner, proposer: Proposer | None) -> None:
    """Raises ConfigError where a runner cannot verify drafts."""
    if proposer is None or runner.takes_drafts:
        return
    reason = "the runner for this model and device computes one token at a time"
    raise ConfigError(f"speculative_config: {reason}", param="model.speculative_config")

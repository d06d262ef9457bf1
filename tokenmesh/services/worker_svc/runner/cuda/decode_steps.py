"""DecodeSteps: what a decode step launches, as functions that a graph can record.

They take nothing and read nothing but memory that stays, so that a replay computes a new step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, Self, get_args

import torch

from tokenmesh.kernels.post_update import post_update
from tokenmesh.services.worker_svc.runner.cuda.forward import Forward
from tokenmesh.services.worker_svc.sampling.device_sampler import DeviceSampler, Needs

Kind = Literal["whole", "filtered", "split"]
"""whole: preparation, forward, sampler and update, for rows without filters; filtered: the same
for all; split: preparation and forward, when the host has a word in what follows."""

KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class DecodeSteps:
    """Makes those functions."""

    forward: Forward
    sampler: DeviceSampler
    logits: torch.Tensor
    """float32 [rows, V]: those of all split steps, as a graph's own would be nobody else's."""

    @classmethod
    def make(cls, forward: Forward, sampler: DeviceSampler, num_rows: int) -> Self:
        """For batches of up to `num_rows`."""
        shape = (num_rows, forward.model.facts.vocab_size)
        logits = torch.empty(shape, dtype=torch.float32, device=forward.store.device)
        return cls(forward, sampler, logits)

    def of(self, kind: Kind, size: int) -> Callable[[], torch.Tensor]:
        """For a batch of `size` rows. Returns what was drawn, int64 [2, size], or the logits."""
        if kind == "split":
            return partial(self.forward.decode_logits, size, self.logits[:size])
        needs = Needs(has_filters=kind == "filtered")
        forward, sampler = self.forward, self.sampler
        rows, positions = forward.buffer.rows[:size], forward.buffer.positions[:size]
        starts, draws = forward.iota[: size + 1], forward.iota[:size]

        def whole_step() -> torch.Tensor:
            logits = forward.decode_logits(size)
            drawn = sampler.draw(needs, rows, logits, positions)
            post_update(rows, starts, draws, drawn.tokens, forward.state)
            return drawn.drawn

        return whole_step

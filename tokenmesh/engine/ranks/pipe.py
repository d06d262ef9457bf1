"""Stages of a pipeline: their layers, and the hidden states that pass from one to the next.

The first stage has the embedding, the head, and what draws; the last one sends back the states that
logits are computed from. So a tied embedding is one tensor, and tokens are where rows are.
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import torch

from tokenmesh.shared.clock import perf_s

_TAGS: Final = 1 << 10
"""Messages to one stage have so many tags in turn, more than are ever on their way."""


def stages_of(num_layers: int, stages: int) -> list[range]:
    """Layers of each stage, in order; the first stages have one more where they do not divide."""
    each, more = divmod(num_layers, stages)
    starts = [number * each + min(number, more) for number in range(stages + 1)]
    return [range(first, last) for first, last in pairwise(starts)]


@dataclass(slots=True, eq=False)
class Pipe:
    """A rank's stage, and the way to the ranks of other stages that have the same part of a layer.

    By default there is one stage. Only the thread that computes calls it; all stages carry out
    plans in one order, so what is sent first is received first.
    """

    stage: int = 0
    stages: int = 1
    group: Any = None
    """A process group of torch.distributed, of one rank of each stage."""
    wait_s: float = 0.0
    """Seconds so far in which this stage had to wait for another one."""
    _sent: deque[tuple[Any, torch.Tensor]] = field(default_factory=deque)
    """Messages that may not have arrived yet: their memory must stay."""
    _next_tag: dict[tuple[int, int], int] = field(default_factory=dict)
    """The tag of the next message, by sender and receiver."""

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    def layers(self, num_layers: int) -> range:
        """Return the layers of this stage."""
        return stages_of(num_layers, self.stages)[self.stage]

    def send(self, x: torch.Tensor, stage: int) -> None:
        """Let x, contiguous, go to another stage; nothing may change it any more."""
        work = self.group.send([x], stage, self._tag(self.stage, stage))
        self._sent.append((work, x))
        # those before it were received before the steps that this one follows
        while len(self._sent) > 2 * self.stages:
            self._sent.popleft()[0].wait()

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, stage: int) -> torch.Tensor:
        """Return the next tensor of another stage."""
        x, began_s = torch.empty(shape, dtype=dtype), perf_s()
        self.group.recv([x], stage, self._tag(stage, self.stage)).wait()
        self.wait_s += perf_s() - began_s
        return x

    def _tag(self, sender: int, receiver: int) -> int:
        tag = self._next_tag.get((sender, receiver), 0)
        self._next_tag[sender, receiver] = (tag + 1) % _TAGS
        return tag

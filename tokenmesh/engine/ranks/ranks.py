"""Ranks: which part of a model this process has, and the sums that all parts make together."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.distributed import AllreduceOptions, BroadcastOptions, ReduceOp

from tokenmesh.engine.ranks.pipe import Pipe
from tokenmesh.shared.clock import perf_s
from tokenmesh.shared.errors import ConfigError

GATHERED_NUMBERS: Final = 1 << 16
"""Up to so many numbers, each of three or more ranks sums all of them; above, it sums its share."""
_LEADER: Final = 0
_LOGITS: Final = 1
"""The tag of parts of logits, which go to the leader only."""


@dataclass(slots=True, eq=False)
class Ranks:
    """One rank of a group; by default the only one. Every rank calls the same methods in one order.

    Only the thread that computes calls them. A peer that ends makes them raise or hang: the link
    ends the process then.
    """

    rank: int = 0
    world: int = 1
    group: Any = None
    """A process group of torch.distributed."""
    by_expert: bool = False
    """A rank has some experts whole, and not a part of each."""
    redundant: int | None = None
    """Further copies of experts over all ranks; None: experts stay where they are."""
    num_sums: int = 0
    pipe: Pipe = field(default_factory=Pipe)
    """To the ranks of other stages; a rank's number and its group are those within its stage."""
    sum_s: float = 0.0
    """Seconds in sums so far, waits for other ranks included."""
    is_alone: bool = False
    """See `alone`."""

    @property
    def leads(self) -> bool:
        return self.rank == _LEADER

    @property
    def size(self) -> int:
        """Return the number of ranks in all stages."""
        return self.world * self.pipe.stages

    def part(self, size: int) -> slice:
        """This rank's part of `size` things, which all ranks have equally many of."""
        if size % self.world:
            raise ConfigError(f"{size} is not divisible by {self.world} ranks")
        each = size // self.world
        return slice(self.rank * each, (self.rank + 1) * each)

    def padded_part(self, size: int, rank: int | None = None) -> slice:
        """This rank's part, or another's, where the last ones may be shorter."""
        number = self.rank if rank is None else rank
        each = -(-size // self.world)
        return slice(min(size, number * each), min(size, (number + 1) * each))

    def kv_part(self, heads: int) -> slice:
        """KV heads of this rank; one that several ranks need is on each of them."""
        if heads >= self.world:
            return self.part(heads)
        if self.world % heads:
            raise ConfigError(f"{heads} KV heads do not divide {self.world} ranks")
        first = self.rank * heads // self.world
        return slice(first, first + 1)

    def sum_(self, x: torch.Tensor) -> torch.Tensor:
        """Replace x, contiguous, by the sum over all ranks; nothing happens on one rank alone."""
        if self.world == 1 or self.is_alone:
            return x
        began_s = perf_s()
        if self.world == 2:
            self._exchange(x)
        elif x.numel() <= GATHERED_NUMBERS:
            parts = [torch.empty_like(x) for _ in range(self.world)]
            self.group.allgather([parts], [x]).wait()
            x.copy_(_sum_of(parts))
        else:
            self._sum_shares(x)
        self.num_sums += 1
        self.sum_s += perf_s() - began_s
        return x

    def _exchange(self, x: torch.Tensor) -> None:
        """Two ranks: each sends its part and adds the other's, which is exact in either order."""
        other, peer = torch.empty_like(x), 1 - self.rank
        sent = self.group.send([x], peer, 0)
        self.group.recv([other], peer, 0).wait()
        sent.wait()
        x.add_(other)

    def _sum_shares(self, x: torch.Tensor) -> None:
        """As an all-reduce does: each rank sums a share of the numbers for all. Unlike there each
        number is summed in the order of ranks, so that it does not depend on its place."""
        each = -(-x.numel() // self.world)
        given = x.new_zeros(self.world * each)
        given[: x.numel()] = x.flatten()
        taken = torch.empty_like(given)
        self.group.alltoall_base(taken, given, [], []).wait()
        own = _sum_of(list(taken.view(self.world, each))).to(x.dtype)
        parts = list(given.view(self.world, each))
        self.group.allgather([parts], [own]).wait()
        x.copy_(given[: x.numel()].view_as(x))

    def gather(self, x: torch.Tensor, size: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """x [N, part] of each rank -> [N, size] on the leader: `out`, or a new tensor.

        Other ranks get [N, 0].
        """
        if not self.leads:
            self.group.send([x.contiguous()], _LEADER, _LOGITS).wait()
            return x[:, :0]
        result = x.new_empty(len(x), size) if out is None else out
        others = []
        for rank in range(1, self.world):
            part = self.padded_part(size, rank)
            piece = x.new_empty(len(x), part.stop - part.start)
            others.append((part, piece, self.group.recv([piece], rank, _LOGITS)))
        result[:, self.padded_part(size)] = x
        for part, piece, received in others:
            received.wait()
            result[:, part] = piece
        return result

    def gather_on_all(self, x: torch.Tensor, size: int) -> torch.Tensor:
        """x [N, part] of each rank -> [N, size] on every rank: slower than `gather`."""
        if self.world == 1 or self.is_alone:
            return x
        whole = x.new_zeros(len(x), size)
        whole[:, self.padded_part(size)] = x
        return self.sum_(whole)

    def share(self, x: torch.Tensor) -> None:
        """Fill x, contiguous, with the leader's numbers on every rank."""
        options: Any = BroadcastOptions()
        options.rootRank = _LEADER
        self.group.broadcast([x.view(torch.uint8)], options).wait()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within it there are no sums: this rank's part is a complete smaller model, which may be
        tried on numbers. What it decides by them all ranks must `agree` on.
        """
        before, self.is_alone = self.is_alone, True
        try:
            yield
        finally:
            self.is_alone = before

    def least(self, number: int) -> int:
        """The smallest of all ranks' numbers."""
        value = torch.tensor([number])
        options: Any = AllreduceOptions()
        options.reduceOp = ReduceOp.MIN
        for group in (self.group, self.pipe.group):
            if group is not None and self.size > 1:
                group.allreduce([value], options).wait()
        return int(value)

    def agree(self, flag: bool) -> bool:
        """Return whether it is true on every rank."""
        return bool(self.least(int(flag)))


def _sum_of(parts: list[torch.Tensor]) -> torch.Tensor:
    """In the order of ranks and in float32, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total


ALONE: Final = Ranks()

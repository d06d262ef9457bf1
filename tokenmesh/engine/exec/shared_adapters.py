"""Adapters of a group of ranks: each reads its part of the matrices, and plans name them by number.

A number is given up when nothing on the leader has its matrices any more.
"""

import threading
import weakref
from itertools import count
from pathlib import Path

from tokenmesh.engine.adapters.adapter import AdapterSource, ReadAdapter, lower_priority
from tokenmesh.engine.adapters.matrices import AdapterMatrices
from tokenmesh.engine.plan import StepPlan
from tokenmesh.engine.ranks.frames import AdapterRead
from tokenmesh.engine.ranks.link import FollowerLink, LeaderLink
from tokenmesh.shared.errors import TokenMeshError, Unavailable


class SharedAdapters:
    """Reads adapters on all ranks, or on none. Implements `AdapterSource` on the leader."""

    def __init__(self, reader: AdapterSource, link: LeaderLink) -> None:
        self._reader, self._link = reader, link
        self._numbers = count()
        self._one_at_a_time = threading.Lock()

    def read(self, directory: Path) -> ReadAdapter:
        """Blocks. Raises InvalidInput that names file and key, and Unavailable when other ranks
        find another content there, or none."""
        with self._one_at_a_time:
            number = next(self._numbers)
            self._link.ask_for_adapter(number, str(directory))
            try:
                read = self._reader.read(directory)
            except BaseException:
                self._link.wait_adapter(number)
                self._link.forget_adapter(number)
                raise
            for rank, answer in sorted(self._link.wait_adapter(number).items()):
                problem = answer.error
                if not problem and answer.content_hash != read.content_hash:
                    problem = "it finds another content there"
                if problem:
                    self._link.forget_adapter(number)
                    raise Unavailable(f"rank {rank} cannot read the adapter: {problem}")
        self._link.adapters[read.matrices] = number
        # a thread that collects garbage may hold the link's lock: the link sends it later
        weakref.finalize(read.matrices, self._link.forget_adapter, number).atexit = False
        return read


class FollowedAdapters:
    """The matrices of a rank that follows. A thread reads them while steps run."""

    def __init__(self, reader: AdapterSource, link: FollowerLink) -> None:
        self._reader, self._link = reader, link
        self._matrices: dict[int, AdapterMatrices] = {}
        self._dropped: set[int] = set()
        """Numbers that were given up before their matrices were read."""
        self._lock = threading.Lock()
        threading.Thread(target=self._serve, name="rank-adapters", daemon=True).start()

    def put_into(self, plan: StepPlan) -> None:
        """Give rows their matrices in the place of numbers."""
        for new in plan.new_rows:
            if isinstance(new.adapter, int):
                new.adapter = self._matrices[new.adapter]

    def drop(self, numbers: list[int]) -> None:
        """No later plan names them."""
        with self._lock:
            for number in numbers:
                if self._matrices.pop(number, None) is None:
                    self._dropped.add(number)

    def _serve(self) -> None:
        lower_priority()
        while (asked := self._link.adapters.get()) is not None:
            self._link.adapter_read(self._read(asked.number, Path(asked.directory)))

    def _read(self, number: int, directory: Path) -> AdapterRead:
        try:
            read = self._reader.read(directory)
        except Exception as error:  # the leader says it to the one who asked
            message = error.message if isinstance(error, TokenMeshError) else repr(error)
            with self._lock:
                self._dropped.discard(number)
            return AdapterRead(number, error=message)
        with self._lock:
            if number in self._dropped:
                self._dropped.remove(number)
            else:
                self._matrices[number] = read.matrices
        return AdapterRead(number, read.content_hash)

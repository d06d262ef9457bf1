"""InFlight: work that several requests wait for at the same time, done once."""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

_Key = TypeVar("_Key", bound=Hashable)
_Result = TypeVar("_Result")


@dataclass(slots=True)
class _Job(Generic[_Result]):
    task: "asyncio.Task[_Result]"
    num_waiting: int = 0


class InFlight(Generic[_Key, _Result]):
    """Jobs by their keys. A result is not kept: a later request starts the job again."""

    def __init__(self) -> None:
        self._jobs: dict[_Key, _Job[_Result]] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    async def run(
        self, key: _Key, work: Callable[[], Coroutine[Any, Any, _Result]]
    ) -> tuple[_Result, bool]:
        """The result of the job of this key, and whether this call has started it.

        An error is raised for each caller. The job ends early when its last caller is cancelled.
        """
        job = self._jobs.get(key)
        is_first = job is None
        if job is None:
            job = self._jobs[key] = _Job(asyncio.create_task(work()))
            job.task.add_done_callback(lambda task: self._finish(key, task))
        job.num_waiting += 1
        try:
            # a cancelled caller does not cancel the job of the others
            return await asyncio.shield(job.task), is_first
        finally:
            job.num_waiting -= 1
            if not job.num_waiting and not job.task.done():
                job.task.cancel()
                # a later caller must not join a job that ends
                if self._jobs.get(key) is job:
                    del self._jobs[key]

    def _finish(self, key: _Key, task: "asyncio.Task[_Result]") -> None:
        job = self._jobs.get(key)
        if job is not None and job.task is task:
            del self._jobs[key]
        if not task.cancelled():
            # Mark the exception as retrieved: all callers may have been cancelled.
            task.exception()

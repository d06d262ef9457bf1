"""Renderer: chat templates in a bounded pool of processes, each killed when it runs late."""

from asyncio.subprocess import Process
from typing import Final

from tokenmesh.services.tokenizer_svc.render_job import (
    RenderAnswer,
    RenderFailed,
    RenderJob,
    decode_answer,
    encode,
)
from tokenmesh.shared.child_pool import ChildDied, ChildLate, ChildLimits, ChildPool
from tokenmesh.shared.config.model import TokenizerSettings

_CHILD: Final = "tokenmesh.services.tokenizer_svc.render_child"


class Renderer:
    """Renders jobs in `num_processes` processes, started when first needed.

    A process that dies in a job (time or memory) fails that job only. `stop` ends them all.
    """

    def __init__(self, limits: TokenizerSettings, num_processes: int) -> None:
        self._pool = ChildPool(
            "chat templates to be rendered",
            _CHILD,
            (str(limits.render_time_limit_s), str(limits.render_memory_bytes)),
            ChildLimits(
                num_processes,
                limits.render_queue,
                limits.render_time_limit_s,
                most_each=num_processes,
            ),
            encode(RenderJob(template="", max_chars=0, compile_only=True)),
        )

    @property
    def processes(self) -> tuple[Process, ...]:
        """Those that were started and not replaced since."""
        return self._pool.processes

    async def render(self, job: RenderJob, tenant: str = "", cost: float = 1.0) -> RenderAnswer:
        """The child's answer; tenants take turns. Raises Overloaded when too many jobs wait."""
        try:
            return decode_answer(await self._pool.ask(encode(job), tenant, cost))
        except ChildLate as error:
            return RenderFailed("too_long", error.message)
        except ChildDied as error:
            return RenderFailed("memory", error.message)

    async def stop(self) -> None:
        """End every process; a job in flight fails."""
        await self._pool.stop()

"""ProcessControl: what any process of the mesh can be told, whatever its service."""

from collections.abc import Callable

from tokenmesh.shared.actor import Actor, Context, handles
from tokenmesh.shared.messages import Done, Drain


class ProcessControl(Actor):
    """Listens on the process's own control subject."""

    def __init__(self, drain: Callable[[], None]) -> None:
        super().__init__()
        self._drain = drain

    @handles(Drain)
    async def drain(self, message: Drain, context: Context) -> Done:
        """Take nothing new, finish or hand over, leave for good."""
        self._drain()
        return Done()

"""Models on several ranks whose followers are threads of the test: real links, real sums."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fakes.engine_driver import EngineDriver
from tests.fakes.pool_driver import PoolDriver
from tokenmesh.engine.core.engine import Engine
from tokenmesh.engine.core.speculating import DraftTotals
from tokenmesh.engine.exec.follower import follow
from tokenmesh.engine.exec.leader import build_ranked
from tokenmesh.engine.exec.loaded_model import LoadedPooler, RunnableModel
from tokenmesh.shared.config.environment import RankPlace
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.config.worker import WorkerSettings

START_S = 15.0


class Followers:
    """The other ranks of one model."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.ends: list[str] = []
        """Why ranks noticed that the group has ended."""

    def launch(self, place: RankPlace) -> Callable[[], bool]:
        """Start a rank as a thread."""

        def run() -> None:
            try:
                follow(place, self.end)
            # the leader has heard of it, and the test sees what it does then
            except Exception as error:
                self.ends.append(f"rank {place.rank}: {error}")

        thread = threading.Thread(target=run, name=f"rank {place.rank}", daemon=True)
        self.threads.append(thread)
        thread.start()
        return lambda: not thread.is_alive()

    def end(self, reason: str, is_config: bool) -> None:
        self.ends.append(reason)

    def build(
        self, directory: Path, worker: WorkerSettings, **model: Any
    ) -> RunnableModel | LoadedPooler:
        """The model of a leader in this thread."""
        given = ModelSettings.model_validate({"model": str(directory), "dtype": "float32", **model})
        return build_ranked(given, worker, lambda done, total: None, self.launch, self.end)

    def close(self, loaded: RunnableModel | LoadedPooler) -> None:
        """End the group; all of its threads end."""
        assert loaded.group is not None
        loaded.group.link.close()
        for thread in self.threads:
            thread.join(START_S)
            assert not thread.is_alive()


def ranked(world: int, settings: dict[str, Any]) -> WorkerSettings:
    """Settings of a worker with ranks."""
    given = {
        "device": "cpu",
        "num_gpu_blocks_override": 256,
        "async_scheduling": True,
        "cpu_threads": 1,
        "tensor_parallel_size": world,
        "rank_start_s": START_S,
        # other tests may keep all cores busy
        "rank_silence_s": START_S,
    }
    return WorkerSettings.model_validate({**given, **settings})


class RanksDriver(EngineDriver):
    """An `EngineDriver` over several ranks; close it."""

    model: RunnableModel

    def __init__(self, directory: Path, world: int = 2, **settings: Any) -> None:
        own = {key: settings.pop(key) for key in ModelSettings.model_fields if key in settings}
        self.settings = ranked(world, settings)
        self.followers = Followers()
        built = self.followers.build(directory, self.settings, **own)
        assert isinstance(built, RunnableModel)
        self.model = built
        self._engine = Engine(self.model.runner, self.settings)
        self._num_streams = 0
        self.drafts = DraftTotals()

    def close(self) -> None:
        self.followers.close(self.model)


class RanksPoolDriver(PoolDriver):
    """A `PoolDriver` over several ranks; close it."""

    def __init__(
        self,
        directory: Path,
        world: int = 2,
        *,
        model: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self.settings = ranked(world, settings)
        self.followers = Followers()
        built = self.followers.build(directory, self.settings, **(model or {}))
        assert isinstance(built, LoadedPooler)
        self.loaded = built
        self.engine = Engine(built.runner, self.settings)
        self._num_streams = 0

    def close(self) -> None:
        self.followers.close(self.loaded)

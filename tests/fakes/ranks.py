"""Models on several ranks whose followers are threads of the test: real links, real sums."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fakes.engine_driver import EngineDriver
from tokenmesh.engine.core.engine import Engine
from tokenmesh.engine.core.speculating import DraftTotals
from tokenmesh.engine.exec.follower import follow
from tokenmesh.engine.exec.leader import build_ranked
from tokenmesh.engine.exec.loaded_model import RunnableModel
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


class RanksDriver(EngineDriver):
    """An `EngineDriver` over several ranks; close it."""

    def __init__(self, directory: Path, world: int = 2, **settings: Any) -> None:
        own = {key: settings.pop(key) for key in ModelSettings.model_fields if key in settings}
        worker = {"device": "cpu", "num_gpu_blocks_override": 256, "async_scheduling": True}
        self.settings = WorkerSettings.model_validate(
            {
                **worker,
                "cpu_threads": 1,
                "tensor_parallel_size": world,
                "rank_start_s": START_S,
                # other tests may keep all cores busy
                "rank_silence_s": START_S,
                **settings,
            }
        )
        model = ModelSettings.model_validate({"model": str(directory), "dtype": "float32", **own})
        self.followers = Followers()
        self.model: RunnableModel = build_ranked(
            model,
            self.settings,
            lambda done, total: None,
            self.followers.launch,
            self.followers.end,
        )
        self._engine = Engine(self.model.runner, self.settings)
        self._num_streams = 0
        self.drafts = DraftTotals()

    def close(self) -> None:
        """End the group; all of its threads end."""
        assert self.model.group is not None
        self.model.group.link.close()
        for thread in self.followers.threads:
            thread.join(START_S)
            assert not thread.is_alive()

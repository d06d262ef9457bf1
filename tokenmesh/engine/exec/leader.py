"""The leader of a group of ranks: a runner whose plans the other ranks carry out as well."""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from tokenmesh.engine.exec.balancer import Balancer
from tokenmesh.engine.exec.build_here import build_here
from tokenmesh.engine.exec.compute_thread import Task
from tokenmesh.engine.exec.divisible import check_divisible
from tokenmesh.engine.exec.draws import SharedSampler
from tokenmesh.engine.exec.loaded_model import LoadedPooler, RunnableModel
from tokenmesh.engine.exec.pipeline import StagedLaunch, StageRunner
from tokenmesh.engine.exec.pool_runner import PoolRunner
from tokenmesh.engine.exec.resident import TorchResident
from tokenmesh.engine.exec.role import Role
from tokenmesh.engine.exec.rows import HostRows
from tokenmesh.engine.exec.runner import TorchRunner
from tokenmesh.engine.exec.shared_adapters import SharedAdapters
from tokenmesh.engine.exec.shared_ends import shared_ends
from tokenmesh.engine.models.api import LanguageModel, Progress
from tokenmesh.engine.models.fingerprint import fingerprint
from tokenmesh.engine.models.kv_store import KvStore
from tokenmesh.engine.models.location import locate
from tokenmesh.engine.models.tree.expert_slots import ExpertSlots
from tokenmesh.engine.plan import StepPlan, StepResult
from tokenmesh.engine.ranks.ends import end_process
from tokenmesh.engine.ranks.frames import Finish, HeadRead, MoveExpert, SleepRanks, WakeRanks
from tokenmesh.engine.ranks.launch import launch_process
from tokenmesh.engine.ranks.link import End, LeaderLink
from tokenmesh.engine.ranks.placement import Move
from tokenmesh.engine.ranks.rendezvous import Launch, LeaderGroup, lead_group
from tokenmesh.engine.sampling.sampler import RowSampler
from tokenmesh.shared.config.environment import rank_place
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

_END: Final = end_process(0)

Balances = Callable[[int, Callable[[], Sequence[ExpertSlots]]], Balancer]


def build_ranked(
    model: ModelSettings,
    worker: WorkerSettings,
    progress: Progress,
    launch: Launch = launch_process,
    end: End = _END,
) -> RunnableModel | LoadedPooler:
    """`build_here` over `worker.num_ranks` ranks, of which this process is the first.

    Raises ConfigError for what cannot be divided, before any other rank is started.
    """
    check_divisible(model, worker)
    group = lead_group(model, worker, rank_place(), launch, end)
    try:
        built = build_here(model, worker, progress, _role(group, model, worker, end))
        group.link.is_loaded = True
        _compare(locate(model, with_code=model.trust_remote_code), group.link)
    except Exception as error:
        is_config = isinstance(error, ConfigError | CheckpointError)
        group.link.fail(f"the leader cannot load the model: {error}", is_config=is_config)
        group.link.close()
        raise
    return replace(built, group=group)


def _role(group: LeaderGroup, model: ModelSettings, worker: WorkerSettings, end: End) -> Role:
    ranks, pipe, balances = group.ranks, group.ranks.pipe, None
    if worker.enable_eplb:
        nodes = max(1, ranks.world // group.local_world)
        balances = partial(Balancer, worker.eplb_config, ranks.world, nodes)
    return Role(
        group.ranks,
        group.local_world,
        partial(
            LeadingRunner,
            link=group.link,
            end=end,
            balances=balances,
            has_head=model.speculative_config.has_head,
        )
        if pipe.stages == 1
        else partial(LeadingStage, link=group.link, end=end, pipe=pipe),
        partial(LeadingPoolRunner, link=group.link, end=end),
        partial(LeadingResident, link=group.link, end=end),
        partial(SharedAdapters, link=group.link),
        partial(shared_ends, group.link, ranks),
    )


def _compare(directory: Path, link: LeaderLink) -> None:
    """Wait until all ranks have loaded. Raises ConfigError for one with another checkpoint."""
    own = fingerprint(directory)
    if any(done.fingerprint != own for done in link.wait_done()):
        raise ConfigError(f"the ranks have different checkpoints at {directory}", param="model")


class LeadingRunner(TorchRunner):
    """Sends each plan before it carries it out, and each draw after it.

    A step that raises ends the group: other ranks may wait in a sum.
    """

    def __init__(
        self,
        model: LanguageModel,
        store: KvStore,
        rows: HostRows,
        sampler: RowSampler,
        *,
        link: LeaderLink,
        end: End,
        balances: Balances | None = None,
        has_head: bool = False,
        **options: Any,
    ) -> None:
        """balances: makes what moves experts between ranks; None: they stay. has_head: a head
        drafts with all ranks' parts of the model."""
        super().__init__(model, store, rows, SharedSampler(sampler, link), **options)
        self._link, self._end, self._has_head = link, end, has_head
        self._balancer = None
        if balances is not None:
            facts: Any = model.facts
            groups = getattr(facts.config.get_text_config(), "n_group", None) or 1
            self._balancer = balances(groups, self._slots)

    def _slots(self) -> Sequence[ExpertSlots]:
        model: Any = self.model  # a module tree, whose import takes seconds
        slots: Sequence[ExpertSlots] = model.expert_slots
        return slots

    def launch(self, plan: StepPlan) -> Task:
        part = None if self._balancer is None else self._balancer.next_part()
        if part is not None:
            self._link.send_command(part)
            self._compute.submit(partial(self._move, part))
        self._link.send_plan(plan)
        return super().launch(plan)

    def _move(self, part: MoveExpert) -> StepResult:
        def move() -> StepResult:
            self._slots()[part.layer].move(
                Move(part.source, part.target, part.swaps), part.first, part.end
            )
            return StepResult()

        return _or_end(move, self._link, self._end)

    def carry_out(self, plan: StepPlan) -> StepResult:
        return _or_end(partial(super().carry_out, plan), self._link, self._end)

    def _propose(self, plan: StepPlan, *states: Any) -> dict[int, list[int]]:
        drafts = super()._propose(plan, *states)
        if self._has_head:
            self._link.send_head_read(HeadRead())
        return drafts


class LeadingPoolRunner(PoolRunner):
    """Sends each plan before it carries it out. A step that raises ends the group."""

    def __init__(self, *parts: Any, link: LeaderLink, end: End, is_async: bool) -> None:
        super().__init__(*parts, is_async=is_async)
        self._link, self._end = link, end

    def launch(self, plan: StepPlan) -> Task:
        self._link.send_plan(plan)
        return super().launch(plan)

    def carry_out(self, plan: StepPlan) -> StepResult:
        return _or_end(partial(super().carry_out, plan), self._link, self._end)


class LeadingStage(StageRunner):
    """The first stage of a pipeline, whose other ranks carry out both halves of its steps."""

    def __init__(
        self,
        model: LanguageModel,
        store: KvStore,
        rows: HostRows,
        sampler: RowSampler,
        *,
        link: LeaderLink,
        end: End,
        is_async: bool,
        **options: Any,
    ) -> None:
        """is_async: ignored, since steps of other lanes are launched meanwhile in any case."""
        draws = SharedSampler(sampler, link)
        super().__init__(model, store, rows, draws, is_async=True, **options)
        self._link, self._end = link, end

    def launch(self, plan: StepPlan) -> StagedLaunch:  # type: ignore[override]
        self._link.send_plan(plan)
        return StagedLaunch(super().launch(plan), self._launch_second)

    def _launch_second(self) -> Task:
        self._link.send_command(Finish())
        return self._compute.submit(self.finish)

    def carry_out(self, plan: StepPlan) -> StepResult:
        return _or_end(partial(super().carry_out, plan), self._link, self._end)

    def finish(self) -> StepResult:
        return _or_end(super().finish, self._link, self._end)


def _or_end(compute: Callable[[], StepResult], link: LeaderLink, end: End) -> StepResult:
    """Compute; where it raises, the group ends: other ranks may wait for this one."""
    try:
        return compute()
    except Exception as error:
        logger.exception("a step of several ranks failed")
        link.fail(f"a step failed on the leader: {error!r}", is_config=False)
        end(f"a step failed: {error!r}", False)
        raise


class LeadingResident(TorchResident):
    """Puts all ranks to sleep, and wakes them; where one of them fails, the group ends."""

    def __init__(self, *parts: Any, link: LeaderLink, end: End) -> None:
        super().__init__(*parts)
        self._link, self._end = link, end

    def sleep(self, level: int) -> int:
        self._link.send_command(SleepRanks(level))
        freed = super().sleep(level)
        self._link.wait_done()
        return freed

    def wake(self, tags: Collection[str]) -> None:
        self._link.send_command(WakeRanks(list(tags)))
        try:
            super().wake(tags)
        except Exception as error:
            # the others may be awake now
            self._end(f"the leader cannot wake up: {error}", False)
            raise
        self._link.wait_done()

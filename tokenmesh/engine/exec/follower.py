"""A rank that follows: the same runner over its part of the weights, driven by the leader's plans.

It knows nothing of NATS or Redis and has no settings of its own.
"""

import logging
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final

import torch

from tokenmesh.engine.exec.build_here import build_here
from tokenmesh.engine.exec.draws import FollowedDraws
from tokenmesh.engine.exec.loaded_model import LoadedPooler, RunnableModel
from tokenmesh.engine.exec.pipeline import StageRunner
from tokenmesh.engine.exec.pool_runner import PoolRunner
from tokenmesh.engine.exec.role import Role
from tokenmesh.engine.exec.rows import HostRows
from tokenmesh.engine.exec.runner import TorchRunner
from tokenmesh.engine.exec.shared_adapters import FollowedAdapters
from tokenmesh.engine.exec.shared_ends import FollowingRunner
from tokenmesh.engine.models.api import LanguageModel
from tokenmesh.engine.models.fingerprint import fingerprint
from tokenmesh.engine.models.kv_store import KvStore
from tokenmesh.engine.models.location import locate
from tokenmesh.engine.plan import ScheduledRow, StepPlan
from tokenmesh.engine.ranks.ends import BAD_CONFIG, end_process
from tokenmesh.engine.ranks.frames import (
    Beat,
    DropAdapters,
    Finish,
    MoveExpert,
    RankDone,
    SleepRanks,
    WakeRanks,
)
from tokenmesh.engine.ranks.link import End, FollowerLink
from tokenmesh.engine.ranks.placement import Move
from tokenmesh.engine.ranks.ranks import Ranks
from tokenmesh.engine.ranks.rendezvous import join_group
from tokenmesh.engine.sampling.sampler import RowSampler
from tokenmesh.shared.config.environment import RankPlace, rank_place
from tokenmesh.shared.errors import CheckpointError, ConfigError

START_S: Final = 600.0
"""Until the leader's settings are there, a follower has no other bound."""

logger = logging.getLogger(__name__)


def follow(place: RankPlace, end: End) -> None:
    """Join the group, load this rank's part, and carry out plans until the leader ends.

    Raises what a step raised, after it has said so to the leader: the others cannot go on either.
    """
    group = join_group(place, START_S, end)
    link = group.link
    try:
        role = Role(
            group.ranks,
            group.local_world,
            partial(_runner, link, group.ranks, group.model.speculative_config.has_head),
            FollowingPoolRunner,
        )
        built = build_here(group.model, group.worker, lambda done, total: None, role)
        link.is_loaded = True
        model = group.model
        directory = locate(model, with_code=model.trust_remote_code)
        link.done(RankDone(fingerprint(directory)))
        _serve(built, link, group.ranks)
    except Exception as error:
        is_config = isinstance(error, ConfigError | CheckpointError)
        link.fail(str(error) or repr(error), is_config=is_config)
        raise
    finally:
        link.close()


def _runner(
    link: FollowerLink,
    ranks: Ranks,
    has_head: bool,
    model: LanguageModel,
    store: KvStore,
    rows: HostRows,
    _sampler: RowSampler,
    **options: Any,
) -> TorchRunner:
    draws = FollowedDraws(link.drawn)
    if ranks.pipe.stages > 1:
        return StageRunner(model, store, rows, draws, pipe=ranks.pipe, **options)
    return FollowingRunner(
        model, store, rows, draws, link=link, ranks=ranks, has_head=has_head, **options
    )


class FollowingPoolRunner(PoolRunner):
    """It computes states; the leader answers with them."""

    def _answers(
        self, entries: Sequence[ScheduledRow], states: torch.Tensor
    ) -> Iterator[tuple[list[ScheduledRow], torch.Tensor]]:
        return iter(())


def _serve(built: RunnableModel | LoadedPooler, link: FollowerLink, ranks: Ranks) -> None:
    adapters = FollowedAdapters(built.adapters, link)
    while (work := link.work.get()) is not None:
        if isinstance(work, StepPlan):
            adapters.put_into(work)
            built.runner.carry_out(work)
            link.progress = Beat(work.step, ranks.sum_s, ranks.pipe.wait_s)
        elif isinstance(work, DropAdapters):
            adapters.drop(work.numbers)
        elif isinstance(work, MoveExpert):
            runner: Any = built.runner  # of a module tree, whose import takes seconds
            move = Move(work.source, work.target, work.swaps)
            runner.model.expert_slots[work.layer].move(move, work.first, work.end)
        elif isinstance(work, Finish):
            assert isinstance(built.runner, StageRunner)
            built.runner.finish()
        elif isinstance(work, SleepRanks | WakeRanks):
            _carry_out(work, built)
            link.done(RankDone())


def _carry_out(command: SleepRanks | WakeRanks, built: RunnableModel | LoadedPooler) -> None:
    if isinstance(command, SleepRanks):
        built.resident.sleep(command.level)
    else:
        built.resident.wake(command.tags)


def run(place: RankPlace) -> int:
    """Follow in this process; its exit code."""
    try:
        follow(place, end_process(place.rank))
    except ConfigError as error:
        logger.critical("%s", error.message)
        return BAD_CONFIG
    return 0


def main() -> int:
    """Run as a child of the leader."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )
    place = rank_place()
    assert place is not None, "the leader sets it"
    return run(place)


if __name__ == "__main__":
    raise SystemExit(main())

"""Admin: commands to all workers of a model: sleep, wake up, profile."""

import asyncio
import logging
from typing import Final, TypeVar

from tokenmesh.services.gateway.mesh.catalog import Catalog
from tokenmesh.shared.bus.base import Bus
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import ProtocolError, TokenMeshError, Unavailable
from tokenmesh.shared.ids import InstanceId, WorkerId
from tokenmesh.shared.membership import Member, Members
from tokenmesh.shared.messages import Message
from tokenmesh.shared.subjects import worker_control

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")
_POLL_S: Final = 0.01


class Admin:
    def __init__(
        self, bus: Bus, members: Members, catalog: Catalog, settings: GatewaySettings
    ) -> None:
        self._bus = bus
        self._members = members
        self._catalog = catalog
        self._settings = settings

    def sleep_levels(self, model: str | None) -> dict[WorkerId, int]:
        """From the last heartbeats of a model's workers that are not draining; 0 is awake.

        Raises UnknownModel, or Unavailable if there are none.
        """
        return {_id(member): _level(member) for member in self._workers(model)}

    async def command(
        self, model: str | None, command: Message, expected: type[_Answer]
    ) -> dict[WorkerId, _Answer]:
        """Every worker's answer. Raises the error of the first worker that failed.

        Commands are idempotent: after an error the caller can send the same one again.
        """
        workers = [_id(member) for member in self._workers(model)]
        name = type(command).__name__
        logger.info("sending %s to %s", name, ", ".join(workers))
        deadline_s = now_s() + self._settings.admin_timeout_s
        answers = await asyncio.gather(
            *(
                self._bus.request(worker_control(each), command, deadline_s=deadline_s)
                for each in workers
            ),
            return_exceptions=True,
        )
        done: dict[WorkerId, _Answer] = {}
        errors: list[TokenMeshError] = []
        for worker, answer in zip(workers, answers, strict=True):
            if isinstance(answer, expected):
                done[worker] = answer
            else:
                errors.append(_error(worker, answer))
        if errors:
            error = errors[0]
            error.message += f" ({len(done)} of {len(workers)} workers succeeded)"
            logger.warning("%s failed: %s", name, error.message)
            raise error
        return done

    async def wait_for_levels(self, levels: dict[WorkerId, int]) -> None:
        """Wait until heartbeats show these levels, since placement uses heartbeats.

        Raises Unavailable after `admin_timeout_s`.
        """
        try:
            async with asyncio.timeout(self._settings.admin_timeout_s):
                # The one listener for heartbeats is the catalog's.
                while not all(  # noqa: ASYNC110
                    self._has_level(each, level) for each, level in levels.items()
                ):
                    await asyncio.sleep(_POLL_S)
        except TimeoutError as error:
            raise Unavailable("the workers' heartbeats do not show it yet") from error

    def _has_level(self, worker: WorkerId, level: int) -> bool:
        member = self._members.get(InstanceId(worker))
        return member is None or _level(member) == level

    def _workers(self, model: str | None) -> list[Member]:
        card = self._catalog.find(model)
        members = self._members.workers(card.name)
        found = [each for each in members if not each.beat.draining]
        if not found:
            raise Unavailable(f"no worker serves the model {card.name!r}", retry_after_s=1.0)
        return sorted(found, key=lambda each: each.beat.instance_id)


def _id(member: Member) -> WorkerId:
    return WorkerId(member.beat.instance_id)


def _level(member: Member) -> int:
    return member.beat.load.sleep_level if member.beat.load else 0


def _error(worker: WorkerId, answer: object) -> TokenMeshError:
    """The error of one worker, of the same class, prefixed with the worker's id."""
    if isinstance(answer, TokenMeshError):
        return type(answer)(
            f"{worker}: {answer.message}", param=answer.param, retry_after_s=answer.retry_after_s
        )
    if isinstance(answer, Exception):
        raise answer
    return ProtocolError(f"{worker}: the answer is {type(answer).__name__}")

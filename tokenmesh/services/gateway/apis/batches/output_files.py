"""OutputFiles: makes the files of a batch from its log, and ends it."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from copy import copy
from typing import Final

from tokenmesh.services.gateway.apis.batches.logs import BatchLogWriter
from tokenmesh.services.gateway.apis.batches.records import BatchProblem, Ending
from tokenmesh.services.gateway.core.files.uploads import NewFile, Uploads, new_file_id
from tokenmesh.services.gateway.core.tenancy.tenant import Access, Tenant
from tokenmesh.shared.clock import wall_s
from tokenmesh.shared.errors import NotFound, Overloaded, PayloadTooLarge

logger = logging.getLogger(__name__)

_PURPOSE: Final = "batch_output"
_ROOM_BYTES: Final = 64 * 1024
"""This is the part of a quota, for what is counted besides the bytes."""
_PAUSE_S: Final = 5.0


class OutputFiles:
    """Files count against the uploads of the tenant. While they do not fit, the batch waits."""

    def __init__(self, writer: BatchLogWriter, uploads: Uploads, tenant: Tenant) -> None:
        self._writer = writer
        self._begun = writer.begun
        self._uploads = uploads
        self._tenant = tenant
        self._settings = writer.logs.settings

    @property
    def max_bytes(self) -> int:
        """Return what the output may have."""
        quota = self._uploads.quota.of(self._tenant)
        return max(0, min(self._settings.max_output_bytes, quota - _ROOM_BYTES))

    async def finish(self, ending: Ending) -> None:
        """Make the files, then append the last state. Raises Conflict."""
        # Those of a gateway that died while it made them.
        for file_id in self._writer.state.making:
            await self._remove(file_id)
        output, errors = new_file_id(), new_file_id()
        await self._begin(ending, [output, errors])
        state = copy(self._writer.state)
        try:
            if state.output_bytes:
                await self._make(output, state.output_bytes, is_error=False)
                state.output_file_id = output
            if state.error_bytes:
                await self._make(errors, state.error_bytes, is_error=True)
                state.error_file_id = errors
        except PayloadTooLarge as error:
            problem = BatchProblem(code="output_too_large", message=error.message)
            state.problems, ending = [*state.problems, problem], "failed"
        state.status, state.ended_s, state.making = ending, wall_s(), []
        try:
            await self._writer.save(state, with_begun=True)
        except BaseException:
            await self._remove(output)
            await self._remove(errors)
            raise

    async def _begin(self, ending: Ending, making: list[str]) -> None:
        state = copy(self._writer.state)
        state.ending, state.making = ending, making
        if ending == "cancelled":
            state.status, state.cancelling_s = "cancelling", state.cancelling_s or wall_s()
        elif ending != "failed":
            state.status, state.finalizing_s = "finalizing", state.finalizing_s or wall_s()
        await self._writer.save(state)

    async def _make(self, file_id: str, num_bytes: int, *, is_error: bool) -> None:
        await self._reserve(file_id, num_bytes)
        kind = "errors" if is_error else "output"
        new = NewFile(
            id=file_id,
            filename=f"{self._begun.id}_{kind}.jsonl",
            purpose=_PURPOSE,
            owner=self._begun.tenant,
            ttl_s=self._begun.output_ttl_s,
        )
        try:
            await self._uploads.add(new, self._lines(is_error))
        except BaseException:
            await self._uploads.quota.release(self._begun.tenant, file_id)
            raise

    async def _reserve(self, file_id: str, num_bytes: int) -> None:
        """Wait until the file fits into the quotas. Raises PayloadTooLarge."""
        give_up_s = self._begun.created_s + self._settings.retention_s - 2 * _PAUSE_S
        while True:
            try:
                await self._uploads.quota.take(
                    self._tenant, file_id, num_bytes, self._begun.output_ttl_s
                )
            except Overloaded as error:
                if wall_s() >= give_up_s:
                    raise PayloadTooLarge(error.message) from error
                logger.info("batch %s waits: %s", self._begun.id, error.message)
                await asyncio.sleep(min(_PAUSE_S, error.retry_after_s or _PAUSE_S))
            else:
                return

    async def _lines(self, is_error: bool) -> AsyncIterator[bytes]:
        async with aclosing(self._writer.logs.lines(self._begun.id)) as lines:
            async for line in lines:
                if line.is_error == is_error:
                    yield line.data

    async def _remove(self, file_id: str) -> None:
        try:
            await self._uploads.remove(file_id, Access(self._tenant))
        except NotFound:
            # It was not described yet.
            await self._uploads.discard(file_id)

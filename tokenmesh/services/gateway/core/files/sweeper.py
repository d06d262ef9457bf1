"""FileSweeper: deletes content that has no description.

A gateway that dies between the two leaves it, and so does a Redis that loses its data. Content is
deleted when two looks in a row have found it: an upload that arrives has no description yet.
"""

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Final

from tokenmesh.services.gateway.core.files.contents import PARTS, FileContents
from tokenmesh.services.gateway.core.files.uploads import Uploads
from tokenmesh.services.gateway.core.tenancy.upload_quota import UploadQuota
from tokenmesh.shared.blobs import Blobs
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.config.http import UploadSettings
from tokenmesh.shared.errors import TokenMeshError
from tokenmesh.shared.journal import Journal
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.redis import Redis

logger = logging.getLogger(__name__)

FILE_SWEEP_S: Final = 300.0
"""It says how often a gateway looks for content of uploads that has no description; longer than
body_timeout_s. Found twice, it is deleted."""

_AT_A_TIME: Final = 256


@dataclass(slots=True)
class FileSweeper:
    """`run` must be running."""

    uploads: Uploads
    contents: FileContents
    settings: UploadSettings
    metrics: Metrics
    _suspects: set[str] = field(default_factory=set)

    @classmethod
    def of(
        cls,
        redis: Redis | None,
        blobs: Blobs,
        journal: Journal | None,
        settings: GatewaySettings,
        metrics: Metrics,
    ) -> "FileSweeper":
        """With the uploads of a gateway."""
        contents, quota = FileContents(journal), UploadQuota(redis, settings)
        uploads = Uploads(redis, blobs, contents, quota, settings)
        return cls(uploads, contents, settings, metrics)

    async def run(self) -> None:
        """Look every `file_sweep_s`, until cancelled."""
        while True:
            await asyncio.sleep(FILE_SWEEP_S)
            try:
                await self.look()
            except TokenMeshError as error:
                logger.debug("cannot look for orphaned files: %s", error.message)

    async def look(self) -> None:
        """Delete what the look before has found as well. Raises Unavailable."""
        suspects: set[str] = set()
        for part in PARTS:
            ids = await self.contents.ids(part)
            for start in range(0, len(ids), _AT_A_TIME):
                some = ids[start : start + _AT_A_TIME]
                suspects |= set(some) - await self.uploads.known(some)
        orphans = suspects & self._suspects
        for file_id in orphans:
            await self.contents.remove(file_id)
            self.metrics.counter("orphaned_files_deleted").inc()
            logger.warning("deleted the content of %s, which has no description", file_id)
        self._suspects = suspects - orphans

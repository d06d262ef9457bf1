"""Uploads: files of tenants. Their content is in JetStream, their descriptions are in Redis.

Content is written before its description and deleted after it, so a description always has
content; content without a description is found by `FileSweeper`.
"""

import re
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from tokenmesh.services.gateway.core.files.contents import FileContents
from tokenmesh.services.gateway.core.http.event_loop import OneByOne
from tokenmesh.services.gateway.core.tenancy.redis_state import uploads_key
from tokenmesh.services.gateway.core.tenancy.tenant import DEFAULT_TENANT, Access, Tenant
from tokenmesh.services.gateway.core.tenancy.upload_quota import UploadQuota
from tokenmesh.shared.blobs import PREFIX, Blobs
from tokenmesh.shared.clock import wall_s
from tokenmesh.shared.config.http import UploadSettings
from tokenmesh.shared.errors import InvalidInput, NotFound, PayloadTooLarge, Unavailable
from tokenmesh.shared.ids import BlobKey, new_request_id
from tokenmesh.shared.redis import Redis


class FileObject(msgspec.Struct, kw_only=True):
    """The description of an upload."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: str = "processed"


class FileDeleted(msgspec.Struct, kw_only=True):
    """The answer to DELETE /v1/files/{id}."""

    id: str
    object: str = "file"
    deleted: bool = True


class FileList(msgspec.Struct, kw_only=True):
    """A page of the tenant's uploads."""

    object: str = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


ID_PREFIX: Final = "file"
_ID: Final = re.compile(rf"{ID_PREFIX}-[A-Za-z0-9]{{1,64}}")
_MAX_NAME_CHARS: Final = 256
_SHOWN_CHARS: Final = 64
_SCANNED: Final = 1000
"""Descriptions that a listing reads at a time."""


def new_file_id() -> str:
    """For a file that will be stored."""
    return new_request_id(ID_PREFIX)


def data_key(file_id: str) -> BlobKey:
    """The key in Redis of content that was lent to the tokenizer."""
    return BlobKey(f"tm:file:{file_id}")


class OwnedFile(FileObject, kw_only=True):
    """The description in Redis."""

    owner: str = DEFAULT_TENANT.name
    """The tenant's name."""

    def shown(self) -> FileObject:
        """The description as clients see it."""
        fields = msgspec.structs.asdict(self)
        del fields["owner"]
        return FileObject(**fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewFile:
    """A file to be stored."""

    id: str
    filename: str
    purpose: str
    owner: str
    ttl_s: int


@dataclass(slots=True)
class Uploads:
    """An upload belongs to a tenant. Raises Unavailable while Redis or JetStream is away."""

    redis: Redis | None
    blobs: Blobs
    contents: FileContents
    quota: UploadQuota
    settings: UploadSettings
    _lending: OneByOne = field(default_factory=OneByOne)

    async def add(self, new: NewFile, parts: AsyncIterator[bytes]) -> FileObject:
        """Store a file. Its bytes must be reserved. Nothing of it stays after an error."""
        try:
            num_bytes = await self.contents.write(new.id, parts)
            if not num_bytes:
                raise InvalidInput("the file is empty", param="file")
            created_s = int(wall_s())
            owned = OwnedFile(
                id=new.id,
                bytes=num_bytes,
                created_at=created_s,
                expires_at=created_s + new.ttl_s,
                filename=new.filename[:_MAX_NAME_CHARS],
                purpose=new.purpose,
                owner=new.owner,
            )
            encoded = msgspec.json.encode(owned)
            await self.blobs.put(encoded, key=_facts_key(new.id), ttl_s=new.ttl_s)
        except BaseException:
            await self.contents.remove(new.id)
            raise
        return owned.shown()

    async def add_data(self, new: NewFile, data: bytes, tenant: Tenant) -> FileObject:
        """Reserve the bytes of a file and store it. Raises UploadQuotaExceeded, Overloaded."""

        async def parts() -> AsyncIterator[bytes]:
            yield data

        await self.quota.take(tenant, new.id, len(data), new.ttl_s)
        try:
            return await self.add(new, parts())
        except BaseException:
            await self.quota.release(new.owner, new.id)
            raise

    async def get(self, file_id: str, access: Access) -> FileObject:
        """The description of a file. Raises NotFound, also for a file of another tenant."""
        return (await self._find(file_id, access)).shown()

    async def _find(self, file_id: str, access: Access) -> OwnedFile:
        unknown = NotFound(
            f"the file {file_id[:_SHOWN_CHARS]!r} does not exist or has expired", param="file_id"
        )
        if _ID.fullmatch(file_id) is None:
            raise unknown
        try:
            data = await self.blobs.get(_facts_key(file_id))
        except NotFound:
            raise unknown from None
        owned = msgspec.json.decode(data, type=OwnedFile)
        if not access.may_see(owned.owner):
            raise unknown
        return owned

    async def page(
        self, access: Access, *, purpose: str | None, limit: int, order: str, after: str | None
    ) -> FileList:
        """Files of the caller's tenant by the time of their expiry.

        Raises NotFound for an unknown `after`.
        """
        ids = await self._ids(access.tenant.name)
        if order == "desc":
            ids.reverse()
        if after is not None:
            if after not in ids:
                raise NotFound(f"after: {after[:_SHOWN_CHARS]!r} does not exist", param="after")
            ids = ids[ids.index(after) + 1 :]
        wanted: list[FileObject] = []
        # clients continue after the last file they got, so a page is only short at the end
        while ids and len(wanted) <= limit:
            found = await self._described(ids[:_SCANNED])
            wanted += [each.shown() for each in found if purpose in (None, each.purpose)]
            ids = ids[_SCANNED:]
        return FileList(
            data=wanted[:limit],
            first_id=wanted[0].id if wanted else None,
            last_id=wanted[:limit][-1].id if wanted else None,
            has_more=len(wanted) > limit,
        )

    async def _ids(self, tenant: str) -> list[str]:
        if self.redis is None:
            raise Unavailable("files cannot be listed: there is no Redis")
        found = await self.redis.call("ZRANGE", uploads_key(tenant), 0, -1)
        names = found if isinstance(found, list) else []
        return [each.decode() for each in names if isinstance(each, bytes)]

    async def _described(self, ids: Sequence[str]) -> list[OwnedFile]:
        """Those of the files that have descriptions; uploads that still arrive have none."""
        if self.redis is None or not ids:
            return []
        keys = [PREFIX + _facts_key(each) for each in ids]
        found = await self.redis.call("MGET", *keys)
        rows = found if isinstance(found, list) else []
        return [
            msgspec.json.decode(each, type=OwnedFile) for each in rows if isinstance(each, bytes)
        ]

    async def known(self, ids: Sequence[str]) -> set[str]:
        """Those of the files that have descriptions, of any tenant."""
        if self.redis is None:
            raise Unavailable("files cannot be compared: there is no Redis")
        return {each.id for each in await self._described(ids)}

    def content(self, file: FileObject) -> AsyncGenerator[bytes, None]:
        """The bytes of a file that `get` has found, in chunks. Must be closed."""
        return self.contents.read(file.id, file.bytes)

    async def lend(self, file_id: str, access: Access) -> None:
        """Put the content of an image where the tokenizer reads it, for `media_ttl_s`.

        Raises NotFound, or PayloadTooLarge for a file that is larger than an image may be.
        """
        file = await self._find(file_id, access)
        limit, key = self.settings.max_media_bytes, data_key(file_id)
        if file.bytes > limit:
            raise PayloadTooLarge(
                f"the file has {file.bytes} bytes, an image at most {limit} "
                "(gateway.max_media_bytes)"
            )
        if await self.blobs.renew(key, self.settings.media_ttl_s):
            return
        async with self._lending.turn():
            data = b"".join([part async for part in self.content(file)])
        await self.blobs.put(data, key=key, ttl_s=self.settings.media_ttl_s)

    async def discard(self, file_id: str) -> None:
        """Delete content that has no description yet, and nothing of a file that has one."""
        if not await self.known([file_id]):
            await self.contents.remove(file_id)

    async def remove(self, file_id: str, access: Access) -> None:
        """Delete a file and stop counting it. Raises NotFound."""
        owner = access.tenant.name
        try:
            owner = (await self._find(file_id, access)).owner
            await self.blobs.remove(_facts_key(file_id))
            await self.blobs.remove(data_key(file_id))
            await self.contents.remove(file_id)
        finally:
            # Also for a file that Redis has evicted: its bytes would count until it expires.
            await self.quota.release(owner, file_id)


def _facts_key(file_id: str) -> BlobKey:
    return BlobKey(f"tm:file-facts:{file_id}")

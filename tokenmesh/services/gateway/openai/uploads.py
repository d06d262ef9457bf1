"""Uploads: files that chats refer to by id, stored in the blob store until they expire.

The bytes are one blob and their description another: the tokenizer reads only the first.
"""

from typing import Final

import msgspec

from tokenmesh.services.gateway.openai.shapes import FileObject
from tokenmesh.services.gateway.tenancy.tenant import DEFAULT_TENANT, Access
from tokenmesh.shared.blobs import Blobs
from tokenmesh.shared.clock import wall_s
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import InvalidInput, NotFound, PayloadTooLarge
from tokenmesh.shared.ids import BlobKey, new_request_id

ID_PREFIX: Final = "file"
_MAX_NAME_CHARS: Final = 256
_MAX_ID_CHARS: Final = 64


def new_file_id() -> str:
    """For a file that will be stored."""
    return new_request_id(ID_PREFIX)


def data_key(file_id: str) -> BlobKey:
    """The key of the bytes; the tokenizer reads it."""
    return BlobKey(f"tm:file:{file_id}")


class _Owned(FileObject, kw_only=True):
    """The description in Redis."""

    owner: str = DEFAULT_TENANT.name
    """The tenant's name."""


class Uploads:
    """An upload belongs to a tenant. Raises Unavailable during an outage of Redis."""

    def __init__(self, blobs: Blobs, settings: GatewaySettings) -> None:
        self._blobs = blobs
        self._settings = settings

    async def add(
        self, file_id: str, data: bytes, filename: str, purpose: str, access: Access
    ) -> FileObject:
        """Store a file under an id of `new_file_id`. Raises InvalidInput, PayloadTooLarge."""
        if not data:
            raise InvalidInput("the file is empty", param="file")
        if len(data) > self._settings.max_media_bytes:
            limit = self._settings.max_media_bytes
            raise PayloadTooLarge(f"the file has {len(data)} bytes, at most {limit}", param="file")
        ttl_s, created_s = self._settings.file_ttl_s, int(wall_s())
        facts = FileObject(
            id=file_id,
            bytes=len(data),
            created_at=created_s,
            expires_at=created_s + ttl_s,
            filename=filename[:_MAX_NAME_CHARS],
            purpose=purpose[:_MAX_NAME_CHARS],
        )
        owned = _Owned(**msgspec.structs.asdict(facts), owner=access.tenant.name)
        await self._blobs.put(data, key=data_key(facts.id), ttl_s=ttl_s)
        await self._blobs.put(msgspec.json.encode(owned), key=_facts_key(facts.id), ttl_s=ttl_s)
        return facts

    async def get(self, file_id: str, access: Access) -> FileObject:
        """The description of a file. Raises NotFound, also for a file of another tenant."""
        return (await self._find(file_id, access))[0]

    async def _find(self, file_id: str, access: Access) -> tuple[FileObject, str]:
        """A file and its owner."""
        unknown = NotFound(
            f"the file {file_id[:_MAX_ID_CHARS]!r} does not exist or has expired", param="file_id"
        )
        try:
            data = await self._blobs.get(_facts_key(file_id[:_MAX_ID_CHARS]))
        except NotFound:
            raise unknown from None
        owned = msgspec.json.decode(data, type=_Owned)
        if not access.may_see(owned.owner):
            raise unknown
        return msgspec.json.decode(data, type=FileObject), owned.owner

    async def content(self, file_id: str) -> bytes:
        """The bytes of a file that `get` has found."""
        return await self._blobs.get(data_key(file_id))

    async def remove(self, file_id: str, access: Access) -> str:
        """Delete a file and return its owner. Raises NotFound."""
        facts, owner = await self._find(file_id, access)
        await self._blobs.remove(_facts_key(facts.id))
        await self._blobs.remove(data_key(facts.id))
        return owner


def _facts_key(file_id: str) -> BlobKey:
    return BlobKey(f"tm:file-facts:{file_id}")

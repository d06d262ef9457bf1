"""Conversations: items that several responses share, in the journal of responses.

Each change appends the whole conversation and deletes the entry before it: the fence of the journal
orders changes, and an old conversation that is used does not expire.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final
from weakref import WeakValueDictionary

import msgspec

from tokenmesh.services.gateway.apis.openai.translation import Json
from tokenmesh.services.gateway.apis.responses.items import (
    ItemsConversation,
    item_prefix,
    shaped_item,
)
from tokenmesh.services.gateway.core.http.errors import invalid
from tokenmesh.services.gateway.core.http.event_loop import Turns
from tokenmesh.services.gateway.core.tenancy.stored_shares import OVERHEAD_BYTES, StoredShares
from tokenmesh.services.gateway.core.tenancy.tenant import Access
from tokenmesh.shared.clock import wall_s
from tokenmesh.shared.config.responses import ResponseSettings
from tokenmesh.shared.errors import Conflict, NotFound, Overloaded, PayloadTooLarge, ProtocolError
from tokenmesh.shared.ids import new_request_id
from tokenmesh.shared.journal import Journal
from tokenmesh.shared.subjects import conversation_log

_ID: Final = re.compile(r"conv_[0-9a-f]{32}")
_SHOWN_CHARS: Final = 80
_ATTEMPTS: Final = 20
"""Other gateways may change the conversation meanwhile."""
_PAUSE_S: Final = 0.01
"""After the first attempt; longer after each further one."""


class Conversation(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A conversation as it is stored."""

    id: str
    tenant: str
    created_s: float
    metadata: dict[str, str] = {}
    items: list[Json] = []

    def view(self) -> Json:
        """The object that clients see."""
        created = int(self.created_s)
        return {"id": self.id, "object": "conversation", "created_at": created} | {
            "metadata": self.metadata
        }


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Conversation)

Change = Callable[[Conversation], Awaitable[None]]


@dataclass(slots=True)
class Conversations:
    """Methods raise NotFound for a conversation that `access` may not see, and Unavailable."""

    journal: Journal
    settings: ResponseSettings
    shares: StoredShares
    _turns: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)

    async def create(
        self, access: Access, items: Sequence[Json], metadata: dict[str, str]
    ) -> Conversation:
        """Raises InvalidInput for an item that is not one, PayloadTooLarge."""
        new = Conversation(
            id=f"conv_{new_request_id('')[1:]}",
            tenant=access.tenant.name,
            created_s=wall_s(),
            metadata=metadata,
            items=[_new_item(item) for item in items],
        )
        await check_items(new.items)
        await self.journal.prepare()
        await self._append(new, 0)
        return new

    async def get(self, given: str, access: Access) -> Conversation:
        return (await self._read(given, access))[0]

    async def update(self, given: str, access: Access, metadata: dict[str, str]) -> Conversation:
        async def change(found: Conversation) -> None:
            found.metadata = metadata

        return await self._change(given, access, change)

    async def delete(self, given: str, access: Access) -> None:
        """Delete it with its items; responses that used them stay."""
        found = await self.get(given, access)
        await self.journal.purge(conversation_log(found.id))
        await self.shares.forget(conversation_log(found.id))

    async def add(self, given: str, access: Access, items: Sequence[Json]) -> list[Json]:
        """Append items and return them with their ids. Raises InvalidInput, PayloadTooLarge."""
        new = [_new_item(item) for item in items]

        async def change(found: Conversation) -> None:
            found.items.extend(new)
            await check_items(found.items, len(found.items) - len(new))

        await self._change(given, access, change)
        return new

    async def add_response(self, given: str, access: Access, items: Sequence[Json]) -> None:
        """Append the items of a response once, however often it is called. See `add`."""

        async def change(found: Conversation) -> None:
            known = {item["id"] for item in found.items}
            found.items.extend(item for item in items if item["id"] not in known)

        await self._change(given, access, change)

    async def remove(self, given: str, access: Access, item_id: str) -> Conversation:
        """Delete one item. Raises NotFound."""

        async def change(found: Conversation) -> None:
            found.items.remove(item_of(found, item_id))

        return await self._change(given, access, change)

    async def _change(self, given: str, access: Access, change: Change) -> Conversation:
        """Changes of one conversation at this gateway take turns: each reads and writes all of it.

        Raises Overloaded when there are too many of them.
        """
        turn = self._turns.setdefault(given, asyncio.Lock())
        try:
            async with asyncio.timeout(self.settings.journal_patience_s):
                await turn.acquire()
        except TimeoutError:
            raise _too_many(given) from None
        try:
            return await self._change_now(given, access, change)
        finally:
            turn.release()

    async def _change_now(self, given: str, access: Access, change: Change) -> Conversation:
        for attempt in range(_ATTEMPTS):
            found, last = await self._read(given, access)
            await change(found)
            key = conversation_log(found.id)
            try:
                await self._append(found, last)
            except Conflict:
                await asyncio.sleep(_PAUSE_S * attempt)
                continue
            await self.journal.purge(key, keep=1)
            return found
        raise _too_many(given)

    async def _read(self, given: str, access: Access) -> tuple[Conversation, int]:
        entry = None
        if _ID.fullmatch(given):
            entry = await self.journal.last(conversation_log(given))
        try:
            found = _decoder.decode(entry.data) if entry is not None else None
        except msgspec.DecodeError as error:
            raise ProtocolError(f"conversation {given} cannot be decoded: {error}") from error
        if entry is None or found is None or not access.may_see(found.tenant):
            text = f"Conversation with id {given[:_SHOWN_CHARS]!r} not found."
            raise NotFound(text, param="conversation")
        return found, entry.sequence

    async def _append(self, new: Conversation, last: int) -> None:
        data, key = self._encoded(new), conversation_log(new.id)
        await self.journal.append(key, data, last)
        await self.shares.count(new.tenant, key, len(data) + OVERHEAD_BYTES)

    def _encoded(self, conversation: Conversation) -> bytes:
        data = _encoder.encode(conversation)
        limit = min(self.settings.max_conversation_bytes, self.journal.max_entry_bytes)
        if len(data) > limit:
            text = f"the conversation has {len(data)} bytes, at most {limit} are allowed"
            raise PayloadTooLarge(text, param="conversation")
        return data


def item_of(conversation: Conversation, item_id: str) -> Json:
    for item in conversation.items:
        if item["id"] == item_id:
            return item
    raise NotFound(f"Item with id {item_id[:_SHOWN_CHARS]!r} not found.", param="item_id")


def _too_many(given: str) -> Overloaded:
    text = f"conversation {given[:_SHOWN_CHARS]!r} is changed by too many requests"
    return Overloaded(text, param="conversation", retry_after_s=1)


async def check_items(items: Sequence[Json], first: int = 0) -> None:
    """Raises InvalidInput that names an item of the request; `first` is the first of these."""
    reader, turns = ItemsConversation(), Turns()
    for index, item in enumerate(items):
        await turns.rest()
        reader.add_item(item, f"items[{max(0, index - first)}]")


def _new_item(item: Json) -> Json:
    """An item with an id of its own."""
    if item.get("type") == "item_reference":
        raise invalid("items", "must not hold references")
    plain = {name: value for name, value in item.items() if name != "id"}
    prefix = item_prefix(plain)
    return shaped_item(plain, f"{prefix}_{new_request_id('')[1:]}")

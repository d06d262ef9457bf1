"""References to stored items, replaced by the items before anything else looks at a request."""

from collections.abc import Mapping
from typing import Any

import msgspec

from tokenmesh.services.gateway.responses.input_items import input_items
from tokenmesh.services.gateway.responses.item_ids import response_of_item
from tokenmesh.services.gateway.responses.items import Item, no_such_item
from tokenmesh.services.gateway.responses.logs import ResponseLogs
from tokenmesh.services.gateway.responses.request import ResponsesRequest
from tokenmesh.services.gateway.tenancy.tenant import Access
from tokenmesh.shared.errors import NotFound, PayloadTooLarge


def has_references(body: ResponsesRequest) -> bool:
    """Whether there is anything to replace."""
    return any(_reference(item) is not None for item in body.items)


async def resolve_references(
    logs: ResponseLogs | None, body: ResponsesRequest, access: Access
) -> ResponsesRequest:
    """The request with the items that it refers to.

    Raises NotFound for what is not stored, PayloadTooLarge for items of too many responses.
    """
    if logs is None or not has_references(body):
        return body
    found: dict[str, Mapping[str, Item]] = {}
    items = []
    for index, item in enumerate(body.items):
        item_id, place = _reference(item), f"input[{index}]"
        if item_id is None:
            items.append(item)
            continue
        response_id = response_of_item(item_id)
        if response_id is not None and response_id not in found:
            if len(found) >= logs.settings.max_chain:
                limit = logs.settings.max_chain
                raise PayloadTooLarge(f"input refers to over {limit} responses", param="input")
            found[response_id] = await _items_of(logs, response_id, access)
        if response_id is None or item_id not in found[response_id]:
            raise no_such_item(item_id, place)
        items.append(found[response_id][item_id])
    return body.model_copy(update={"input": items})


def _reference(item: Item) -> str | None:
    """The id that an item refers to; None when it is an item itself."""
    kind, item_id = item.get("type"), item.get("id")
    is_bare = kind is None and "role" not in item
    return item_id if isinstance(item_id, str) and (is_bare or kind == "item_reference") else None


async def _items_of(logs: ResponseLogs, response_id: str, access: Access) -> dict[str, Item]:
    """Input and output of a response by id; nothing when it is not there, or not yet complete."""
    try:
        ends = await logs.ends(response_id, access)
    except NotFound:
        return {}
    if ends.ended is None:
        return {}
    response = msgspec.json.decode(ends.ended.response, type=dict[str, Any])
    return {item["id"]: item for item in (*input_items(ends.begun), *response["output"])}

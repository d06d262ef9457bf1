"""Stored items that a request refers to: earlier responses, and single items by id."""

from collections.abc import Mapping
from typing import Final

import msgspec

from tokenmesh.services.gateway.openai.translation import Json, invalid
from tokenmesh.services.gateway.responses.items import input_items, no_such_item
from tokenmesh.services.gateway.responses.output_items import response_of_item
from tokenmesh.services.gateway.responses.request import ResponsesRequest
from tokenmesh.services.gateway.responses.response_logs import ResponseLogs
from tokenmesh.services.gateway.tenancy.tenant import Access
from tokenmesh.shared.errors import NotFound, PayloadTooLarge

_PREVIOUS: Final = "previous_response_id"


async def previous_items(logs: ResponseLogs, previous_id: str | None, access: Access) -> list[Json]:
    """Input and output of all responses in the chain of `previous_response_id`, oldest first.

    Raises NotFound, InvalidInput for one that has not ended, PayloadTooLarge over the limits.
    """
    settings = logs.settings
    newest_first: list[list[Json]] = []
    num_bytes = 0
    while previous_id is not None:
        if len(newest_first) >= settings.max_chain:
            raise _chain_too_long(f"{settings.max_chain} responses")
        ends = await logs.ends(previous_id, access, _PREVIOUS)
        if ends.ended is None:
            raise invalid(_PREVIOUS, f"{previous_id!r} has not ended yet")
        num_bytes += len(ends.begun.body) + len(ends.ended.response)
        if num_bytes > settings.max_chain_bytes:
            raise _chain_too_long(f"{settings.max_chain_bytes} bytes")
        body = ends.begun.request()
        response = msgspec.json.decode(ends.ended.response, type=Json)
        newest_first.append([*body.items, *response["output"]])
        previous_id = body.previous_response_id
    return [item for items in reversed(newest_first) for item in items]


def _chain_too_long(limit: str) -> PayloadTooLarge:
    return PayloadTooLarge(f"{_PREVIOUS} leads to more than {limit}", param=_PREVIOUS)


def has_references(body: ResponsesRequest) -> bool:
    """Whether the input refers to stored items."""
    return any(_reference(item) is not None for item in body.items)


async def resolve_references(
    logs: ResponseLogs | None, body: ResponsesRequest, access: Access
) -> ResponsesRequest:
    """The request with references replaced by the items.

    Raises NotFound for items that are not stored, PayloadTooLarge for too many responses.
    """
    if logs is None or not has_references(body):
        return body
    found: dict[str, Mapping[str, Json]] = {}
    items = []
    for index, item in enumerate(body.items):
        item_id = _reference(item)
        if item_id is None:
            items.append(item)
            continue
        response_id = response_of_item(item_id)
        if response_id is not None and response_id not in found:
            if len(found) >= (limit := logs.settings.max_chain):
                text = f"input refers to more than {limit} responses"
                raise PayloadTooLarge(text, param="input")
            found[response_id] = await _items_of(logs, response_id, access)
        if response_id is None or item_id not in found[response_id]:
            raise no_such_item(item_id, f"input[{index}]")
        items.append(found[response_id][item_id])
    return body.model_copy(update={"input": items})


def _reference(item: Json) -> str | None:
    """The id that an item refers to; None if it is an item itself."""
    kind, item_id = item.get("type"), item.get("id")
    is_bare = kind is None and "role" not in item
    return item_id if isinstance(item_id, str) and (is_bare or kind == "item_reference") else None


async def _items_of(logs: ResponseLogs, response_id: str, access: Access) -> dict[str, Json]:
    """Items of a response by id; empty if it is not stored or has not ended."""
    try:
        ends = await logs.ends(response_id, access)
    except NotFound:
        return {}
    if ends.ended is None:
        return {}
    response = msgspec.json.decode(ends.ended.response, type=Json)
    return {item["id"]: item for item in (*input_items(ends.begun), *response["output"])}

"""Items as clients list them: their ids, their shape, and pages of them."""

from typing import Final

from tokenmesh.services.gateway.openai.translation import Json, invalid
from tokenmesh.services.gateway.responses.output_items import input_item_id
from tokenmesh.services.gateway.responses.records import ResponseBegun
from tokenmesh.services.gateway.responses.request import ResponsesRequest

_PREFIXES: Final = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


def input_items(begun: ResponseBegun) -> list[Json]:
    """Input items of a response with their ids, oldest first."""
    return request_items(begun.request(), begun.id)


def request_items(body: ResponsesRequest, response_id: str) -> list[Json]:
    """The same for its request."""
    return [_input_item(item, index, response_id) for index, item in enumerate(body.items)]


def _input_item(item: Json, index: int, response_id: str) -> Json:
    return shaped_item(item, input_item_id(item_prefix(item), response_id, index))


def item_prefix(item: Json) -> str:
    """What the id of an item begins with."""
    return _PREFIXES.get(item.get("type") or "message", "item")


def shaped_item(item: Json, item_id: str) -> Json:
    """An item as OpenAI lists it; an id of its own counts before `item_id`."""
    kind = item.get("type") or "message"
    shaped = {
        "id": item_id,
        "type": kind,
        **{key: each for key, each in item.items() if each is not None},
    }
    content = item.get("content")
    if kind == "message" and isinstance(content, str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        shaped["content"] = [{"type": part, "text": content}]
    if kind == "message":
        shaped.setdefault("status", "completed")
    return shaped


def page(
    items: list[Json], *, limit: int, order: str, after: str | None, before: str | None
) -> Json:
    """A page of items as OpenAI's list object. Raises InvalidInput for an unknown id."""
    if order == "desc":
        items = items[::-1]
    ids = [item["id"] for item in items]
    start = _index(ids, after, "after") + 1 if after is not None else 0
    end = _index(ids, before, "before") if before is not None else len(items)
    found = items[start:end]
    # With `before` alone the page ends at that item.
    shown = found[-limit:] if before is not None and after is None else found[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(shown) < len(found),
    }


def _index(ids: list[str], wanted: str, param: str) -> int:
    if wanted not in ids:
        raise invalid(param, f"{wanted[:80]!r} matches no input item")
    return ids.index(wanted)

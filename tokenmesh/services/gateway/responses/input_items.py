"""Input items of a response, as GET /v1/responses/{id}/input_items pages through them."""

from typing import Any, Final

from tokenmesh.services.gateway.responses.item_ids import input_item_id
from tokenmesh.services.gateway.responses.records import Begun
from tokenmesh.shared.errors import InvalidInput

Item = dict[str, Any]

_PREFIXES: Final = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


def input_items(begun: Begun) -> list[Item]:
    """The oldest first; each has an id."""
    items = begun.request().items
    return [_shape(item, index, begun.id) for index, item in enumerate(items)]


def page(
    items: list[Item], *, limit: int, order: str, after: str | None, before: str | None
) -> Item:
    """OpenAI's list object. Raises InvalidInput for an id that is none of theirs."""
    if order == "desc":
        items = items[::-1]
    ids = [item["id"] for item in items]
    start = _place(ids, after, "after") + 1 if after is not None else 0
    end = _place(ids, before, "before") if before is not None else len(items)
    found = items[start:end]
    # What `before` names is what the page ends at.
    shown = found[-limit:] if before is not None and after is None else found[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(shown) < len(found),
    }


def _place(ids: list[str], wanted: str, param: str) -> int:
    if wanted not in ids:
        raise InvalidInput(f"{param}: there is no input item {wanted[:80]!r}", param=param)
    return ids.index(wanted)


def _shape(item: Item, index: int, response_id: str) -> Item:
    kind = item.get("type") or "message"
    prefix = _PREFIXES.get(kind, "item")
    shaped = {
        "id": input_item_id(prefix, response_id, index),
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

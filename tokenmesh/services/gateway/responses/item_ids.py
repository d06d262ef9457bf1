"""Ids of items. Each holds its response's id and its place there: who replays makes the same, and
whoever is given one knows where to look."""

import re
from typing import Final

_RESPONSE: Final = "resp_"
_ITEM: Final = re.compile(r"[a-z]{1,8}_([0-9a-f]{32})i?[0-9a-f]{4,8}")


def output_item_id(prefix: str, response_id: str, index: int) -> str:
    """Such as `msg_5f0c...0002`."""
    return f"{prefix}_{response_id.removeprefix(_RESPONSE)}{index:04x}"


def input_item_id(prefix: str, response_id: str, index: int) -> str:
    """Such as `msg_5f0c...i0002`."""
    return f"{prefix}_{response_id.removeprefix(_RESPONSE)}i{index:04x}"


def response_of_item(item_id: str) -> str | None:
    """The response whose item that is; None for an id that is none of ours."""
    found = _ITEM.fullmatch(item_id)
    return None if found is None else _RESPONSE + found[1]

"""Folding: the frames that a stream's writer makes of one chunk, as a single chunk."""

from collections.abc import Iterable
from typing import Any, Final

import msgspec

_DATA: Final = b"data: "


def chunks_of(frames: bytes, index: int) -> list[dict[str, Any]]:
    """The chunks in some frames that belong to a choice, or to none."""
    bodies = [part.removeprefix(_DATA) for part in frames.split(b"\n\n") if part.startswith(_DATA)]
    chunks: list[dict[str, Any]] = [msgspec.json.decode(body) for body in bodies]
    return [each for each in chunks if _is_of(each, index)]


def fold(chunks: Iterable[dict[str, Any]], empty: dict[str, Any]) -> dict[str, Any]:
    """All of them as one; `empty`: the chunk when there is none."""
    folded: dict[str, Any] | None = None
    for chunk in chunks:
        if folded is None:
            folded = chunk
            continue
        _join_choices(folded["choices"], chunk["choices"])
        folded |= {name: chunk[name] for name in chunk.keys() - {"choices"}}
    return empty if folded is None else folded


def _is_of(chunk: dict[str, Any], index: int) -> bool:
    return all(choice["index"] == index for choice in chunk["choices"])


def _join_choices(whole: list[dict[str, Any]], further: list[dict[str, Any]]) -> None:
    if not whole or not further:
        whole.extend(further)
        return
    into, choice = whole[0], further[0]
    for name, value in choice.items():
        known = into.get(name)
        if name == "delta":
            _join_deltas(into[name], value)
        elif name == "logprobs" and known is not None and value is not None:
            into[name] = {key: _joined(known[key], value[key]) for key in known}
        elif name in ("text", "token_ids") and known is not None:
            into[name] = known + value
        elif value is not None or known is None:
            into[name] = value


def _join_deltas(into: dict[str, Any], delta: dict[str, Any]) -> None:
    for name, value in delta.items():
        if name == "tool_calls":
            _join_calls(into.setdefault(name, []), value)
        elif name in ("content", "reasoning") and isinstance(into.get(name), str):
            into[name] += value or ""
        else:
            into[name] = value


def _join_calls(into: list[dict[str, Any]], calls: list[dict[str, Any]]) -> None:
    by_index = {each["index"]: each for each in into}
    for call in calls:
        known = by_index.get(call["index"])
        if known is None:
            into.append(call)
        else:
            known["function"]["arguments"] += call["function"]["arguments"]


def _joined(known: Any, value: Any) -> Any:
    return known + value if isinstance(known, list) and isinstance(value, list) else value

"""The frames of one chunk become one chunk."""

from typing import Any

from tokenmesh.services.gateway.apis.scale_out.derender_chunk import chunks_of, fold
from tokenmesh.services.gateway.core.http.sse import frame

EMPTY: dict[str, Any] = {"id": "r", "choices": []}


def chunk(index: int, **choice: Any) -> dict[str, Any]:
    return {"id": "r", "choices": [{"index": index, "finish_reason": None, **choice}]}


def call(index: int, arguments: str, **fields: Any) -> dict[str, Any]:
    return {"index": index, "function": {"arguments": arguments, **fields}}


def test_deltas_are_joined_and_calls_by_their_index() -> None:
    parts = [
        chunk(1, delta={"role": "assistant", "content": ""}),
        chunk(1, delta={"content": "a", "tool_calls": [call(0, "", name="f")]}),
        chunk(1, delta={"tool_calls": [call(0, "{"), call(1, "", name="g")]}),
        chunk(1, delta={}, finish_reason="tool_calls"),
        chunk(0, delta={"content": "another choice's"}),
    ]
    frames = b"".join(frame(each) for each in parts)
    (choice,) = fold(chunks_of(frames, 1), EMPTY)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["delta"] == {
        "role": "assistant",
        "content": "a",
        "tool_calls": [call(0, "{", name="f"), call(1, "", name="g")],
    }


def test_log_probabilities_and_ids_are_joined() -> None:
    parts = [
        chunk(0, text="a", logprobs=None, token_ids=[1]),
        chunk(0, text="b", logprobs={"tokens": ["b"], "text_offset": [1]}, token_ids=[2]),
        chunk(0, text="", logprobs={"tokens": ["c"], "text_offset": [2]}, token_ids=[3]),
    ]
    (choice,) = fold(parts, EMPTY)["choices"]
    assert (choice["text"], choice["token_ids"]) == ("ab", [1, 2, 3])
    assert choice["logprobs"] == {"tokens": ["b", "c"], "text_offset": [1, 2]}


def test_nothing_to_show_is_the_empty_chunk() -> None:
    assert fold(chunks_of(b"", 0), EMPTY) == EMPTY

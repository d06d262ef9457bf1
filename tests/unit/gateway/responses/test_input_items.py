"""Pages of input items have each item once, for any page size."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmesh.services.gateway.apis.responses.items import input_items, page
from tokenmesh.services.gateway.apis.responses.records import ResponseBegun
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.ids import GatewayId, ModelName, ResponseId


def begun(items: object) -> ResponseBegun:
    return ResponseBegun(
        id=ResponseId("resp_1"),
        owner=GatewayId("gateway-1"),
        model=ModelName("m"),
        body=msgspec.json.encode({"input": items}),
        created_s=0.0,
        deadline_s=0.0,
        seed=0,
    )


@given(st.integers(0, 30), st.integers(1, 7), st.sampled_from(["asc", "desc"]))
def test_pages_add_up(count: int, limit: int, order: str) -> None:
    items = [{"id": f"i{number}"} for number in range(count)]
    found, after = [], None
    while True:
        one = page(items, limit=limit, order=order, after=after, before=None)
        found += one["data"]
        after = one["last_id"]
        if not one["has_more"]:
            break
    assert found == (items if order == "asc" else items[::-1])


@given(st.integers(1, 20), st.integers(1, 7), st.data())
def test_a_page_ends_before_an_item(count: int, limit: int, data: st.DataObject) -> None:
    items = [{"id": f"i{number}"} for number in range(count)]
    place = data.draw(st.integers(0, count - 1))
    one = page(items, limit=limit, order="asc", after=None, before=f"i{place}")
    assert one["data"] == items[max(0, place - limit) : place]
    assert one["has_more"] == (place > limit)


def test_items_have_openais_shape() -> None:
    (item,) = input_items(begun("Hi"))
    assert item.pop("id").startswith("msg_")
    assert item == {
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": "Hi"}],
        "status": "completed",
    }


def test_ids_stay_the_same_and_given_ones_are_kept() -> None:
    call = {"type": "function_call", "id": None, "call_id": "c", "name": "f", "arguments": ""}
    items = [{"role": "user", "content": "Hi", "id": "msg_mine"}, call]
    first, second = input_items(begun(items))
    assert first["id"] == "msg_mine"
    assert second["id"].startswith("fc_")
    assert second["arguments"] == ""
    assert input_items(begun(items)) == [first, second]


@pytest.mark.parametrize("name", ["after", "before"])
def test_an_unknown_id_is_refused(name: str) -> None:
    given_ids = {"after": None, "before": None, name: "msg_x"}
    with pytest.raises(InvalidInput, match=name):
        page([{"id": "a"}], limit=1, order="asc", **given_ids)

"""A request's context: the id of its answer."""

import pytest

from tokenmesh.services.gateway.core.context import RequestContext
from tokenmesh.shared.ids import RequestId


@pytest.mark.parametrize(
    ("kind", "request_id", "expected"),
    [
        ("cmpl", "mine", "cmpl-mine"),
        ("cmpl", "cmpl-1", "cmpl-1"),
        # a line of a batch has no kind, and an id that is ours
        ("", "batch_req_1", "batch_req_1"),
    ],
)
def test_the_kind_stands_before_an_id_that_the_client_chose(
    kind: str, request_id: str, expected: str
) -> None:
    context = RequestContext(RequestId(request_id), False, 0.0, kind=kind)
    assert context.answer_id == expected

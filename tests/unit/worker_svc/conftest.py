"""Requests for tests of the engine without a model."""

from collections.abc import Callable
from typing import Any

import pytest

from tokenmesh.engine.request.request import Request
from tokenmesh.engine.request.spec import RequestSpec, StreamKey
from tokenmesh.shared.ids import GatewayId, RequestId
from tokenmesh.shared.messages.sampling import SamplingParams

MakeRequest = Callable[..., Request]


@pytest.fixture
def make_request() -> MakeRequest:
    """`make_request(stream, prompt, output=(), max_tokens=4, sampling={...}, **fields)`."""

    def make(
        stream: int,
        prompt: list[int],
        output: tuple[int, ...] = (),
        max_tokens: int = 4,
        sampling: dict[str, Any] | None = None,
        **fields: Any,
    ) -> Request:
        return Request(
            RequestSpec(
                key=StreamKey(GatewayId("gateway"), stream, 0),
                request_id=RequestId(f"r{stream}"),
                num_prompt=len(prompt),
                sampling=SamplingParams(seed=stream, max_tokens=max_tokens, **(sampling or {})),
                **fields,
            ),
            [*prompt, *output],
        )

    return make

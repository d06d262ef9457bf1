"""A client of the Responses API that checks every event."""

import json
from typing import Any

import httpx

Event = dict[str, Any]


class ResponseClient:
    """Sends requests to one gateway."""

    def __init__(self, http: httpx.AsyncClient, model: str) -> None:
        self.http = http
        self.model = model

    async def create(self, **fields: Any) -> dict[str, Any]:
        """POST; the Response."""
        body = {"model": self.model, "input": "Hi", **fields}
        response = await self.http.post("/v1/responses", json=body)
        assert response.status_code == 200, response.text
        return dict(response.json())

    async def get(self, response_id: str, status: int = 200, **query: Any) -> dict[str, Any]:
        """GET one."""
        response = await self.http.get(f"/v1/responses/{response_id}", params=query)
        assert response.status_code == status, response.text
        return dict(response.json())

    async def stream(self, limit: int | None = None, **fields: Any) -> list[Event]:
        """POST; returns all events or the first ones."""
        body = {"model": self.model, "input": "Hi", "stream": True, **fields}
        async with self.http.stream("POST", "/v1/responses", json=body) as response:
            assert response.status_code == 200, await response.aread()
            return await read_events(response, limit)

    async def events(self, response_id: str, after: int | None = None) -> list[Event]:
        """GET; all events after a number."""
        query: dict[str, Any] = {"stream": "true"}
        if after is not None:
            query["starting_after"] = after
        path = f"/v1/responses/{response_id}"
        async with self.http.stream("GET", path, params=query) as response:
            assert response.status_code == 200, await response.aread()
            return await read_events(response, None)


async def read_events(response: httpx.Response, limit: int | None) -> list[Event]:
    """The data of all frames, or of the first ones."""
    events: list[Event] = []
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            events.append(json.loads(line.removeprefix("data: ")))
            if len(events) == limit:
                break
    return events


def numbers(events: list[Event]) -> list[int]:
    """Their sequence numbers."""
    return [event["sequence_number"] for event in events]


def text_of(events: list[Event]) -> str:
    """All text, by the deltas."""
    return "".join(each["delta"] for each in events if each["type"] == "response.output_text.delta")


def output_text(response: dict[str, Any]) -> str:
    """All text of a Response."""
    return "".join(
        part["text"]
        for item in response["output"]
        if item["type"] == "message"
        for part in item["content"]
    )

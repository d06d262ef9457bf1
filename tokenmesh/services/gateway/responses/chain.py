"""The conversation that `previous_response_id` leads back over."""

from typing import Any

import msgspec

from tokenmesh.services.gateway.responses.logs import ResponseLogs
from tokenmesh.services.gateway.tenancy.tenant import Access
from tokenmesh.shared.errors import InvalidInput, PayloadTooLarge

_PARAM = "previous_response_id"


async def previous_items(
    logs: ResponseLogs, previous_id: str | None, access: Access
) -> list[dict[str, Any]]:
    """Input and output of all responses before, the oldest first.

    Raises NotFound, InvalidInput for one that has not ended, PayloadTooLarge over the limits.
    """
    settings = logs.settings
    newest_first: list[list[dict[str, Any]]] = []
    num_bytes = 0
    while previous_id is not None:
        if len(newest_first) >= settings.max_chain:
            limit = settings.max_chain
            raise PayloadTooLarge(f"{_PARAM} leads back over {limit} responses", param=_PARAM)
        ends = await logs.ends(previous_id, access, _PARAM)
        if ends.ended is None:
            raise InvalidInput(f"response {previous_id!r} has not ended yet", param=_PARAM)
        num_bytes += len(ends.begun.body) + len(ends.ended.response)
        if num_bytes > settings.max_chain_bytes:
            limit = settings.max_chain_bytes
            raise PayloadTooLarge(f"{_PARAM} leads back over {limit} bytes", param=_PARAM)
        body = ends.begun.request()
        response = msgspec.json.decode(ends.ended.response, type=dict[str, Any])
        newest_first.append([*body.items, *response["output"]])
        previous_id = body.previous_response_id
    return [item for items in reversed(newest_first) for item in items]

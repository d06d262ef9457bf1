"""GET /tokenizer_info: a model's tokenizer_config.json."""

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from tokenmesh.services.gateway.gateway import Gateway
from tokenmesh.shared import subjects
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.messages import ReadTokenizerConfig, TokenizerConfigRead


def tokenizer_info_router(gateway: Gateway) -> APIRouter:
    """The route; it exists only where `gateway.tokenizer_info` is on: templates may be private."""
    router = APIRouter(tags=["tokens"])
    timeout_s = gateway.settings.tokenize_timeout_s

    @router.get("/tokenizer_info")
    async def tokenizer_info(
        model: Annotated[str | None, Query(description="Needed where there are several.")] = None,
    ) -> Response:
        """The tokenizer's configuration and the chat template in force."""
        card = await gateway.catalog.find_soon(model)
        answer = await gateway.calls.ask(
            subjects.tokenize(card.name),
            ReadTokenizerConfig(model=card.name),
            TokenizerConfigRead,
            timeout_s=timeout_s,
            deadline_s=now_s() + timeout_s,
        )
        return Response(answer.config_json, media_type="application/json")

    return router

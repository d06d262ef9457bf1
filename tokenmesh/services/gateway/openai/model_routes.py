"""GET /v1/models and /v1/models/{id}."""

from fastapi import APIRouter
from starlette.responses import Response

from tokenmesh.services.gateway.errors import json_response
from tokenmesh.services.gateway.gateway import Gateway
from tokenmesh.services.gateway.openai.shapes import Model, ModelList, ModelPermission
from tokenmesh.shared.messages.beat import ModelCard


def models_router(gateway: Gateway) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["models"])
    scale_out = gateway.scale_out
    catalog = scale_out.catalog if scale_out.is_enabled else gateway.catalog

    @router.get("/v1/models")
    async def list_models() -> Response:
        """Every model that a live worker serves, once for each of its names.

        With the scale-out routes also those that a tokenizer alone knows.
        """
        cards = catalog.all()
        names = ((card, name) for card in cards for name in catalog.names(card))
        shapes = [_shape(card, name) for card, name in names]
        shapes += [_shape(card, name) for name, card in catalog.splits()]
        return json_response(ModelList(data=shapes))

    # A model's name may hold slashes.
    @router.get("/v1/models/{model_id:path}")
    async def get_model(model_id: str) -> Response:
        """One model by any of its names."""
        if not model_id:
            return await list_models()
        return json_response(_shape(await catalog.find_soon(model_id), model_id))

    return router


def _shape(card: ModelCard, name: str) -> Model:
    created = int(card.created_s)
    return Model(
        id=name,
        created=created,
        root=card.name,
        max_model_len=card.max_model_len,
        permission=[ModelPermission(id=f"modelperm-{name}", created=created)],
    )

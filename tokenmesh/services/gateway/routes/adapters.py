"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them.

They exist only where `gateway.admin_routes` is on, and need a key with the right of an operator.
"""

from typing import Final

from fastapi import APIRouter, Depends
from pydantic import Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from tokenmesh.services.gateway.context import context_of
from tokenmesh.services.gateway.gateway import Gateway
from tokenmesh.services.gateway.http.body import body_schema, read_json
from tokenmesh.services.gateway.http.fields import Bounded
from tokenmesh.services.gateway.tenancy.auth import require_admin

LOAD: Final = "/v1/load_lora_adapter"
UNLOAD: Final = "/v1/unload_lora_adapter"


class LoadLoraAdapter(Bounded):
    lora_name: str = Field(min_length=1, description="What requests name as their model.")
    lora_path: str = Field(
        min_length=1, description="A directory on the workers' machines, below those allowed."
    )
    load_inplace: bool = Field(
        default=False, description="Replace the adapter that has this name now."
    )
    model: str | None = Field(
        default=None, description="The base model; required only where there are several."
    )


class UnloadLoraAdapter(Bounded):
    lora_name: str = Field(min_length=1, description="The adapter's name.")
    model: str | None = Field(default=None, description="Its base model.")


BODIES: Final = (LoadLoraAdapter, UnloadLoraAdapter)


def adapters_router(gateway: Gateway) -> APIRouter:
    router = APIRouter(tags=["admin"], dependencies=[Depends(require_admin)])

    @router.post(LOAD, openapi_extra=body_schema(LoadLoraAdapter))
    async def load_lora_adapter(request: Request) -> Response:
        """Load an adapter on every worker of a model; answered when all have it."""
        body = await read_json(request, LoadLoraAdapter, gateway.settings)
        warnings = await gateway.adapters.load(
            body.lora_name, body.lora_path, in_place=body.load_inplace, model=body.model
        )
        context_of(request.scope).warnings.extend(warnings)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @router.post(UNLOAD, openapi_extra=body_schema(UnloadLoraAdapter))
    async def unload_lora_adapter(request: Request) -> Response:
        """Take no more requests for an adapter; streams that run go on."""
        body = await read_json(request, UnloadLoraAdapter, gateway.settings)
        await gateway.adapters.unload(body.lora_name, body.model)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return router

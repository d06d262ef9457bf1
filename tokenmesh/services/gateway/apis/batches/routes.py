"""POST and GET /v1/batches, GET /v1/batches/{id}, POST /v1/batches/{id}/cancel."""

from typing import Annotated, Final, Literal

from fastapi import APIRouter, Query
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from tokenmesh.services.gateway.apis.batches.service import BatchService
from tokenmesh.services.gateway.apis.openai.translation import warn_unknown
from tokenmesh.services.gateway.core.context import access_of, context_of
from tokenmesh.services.gateway.core.files.uploads import FileObject
from tokenmesh.services.gateway.core.gateway_core import Core
from tokenmesh.services.gateway.core.http.body import body_schema, read_json
from tokenmesh.services.gateway.core.http.fields import Bounded, Metadata
from tokenmesh.services.gateway.core.http.sse import json_response
from tokenmesh.shared.errors import InvalidInput

PATH: Final = "/v1/batches"
Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]


class OutputExpiry(Bounded, extra="forbid", strict=True):
    anchor: Literal["created_at"] = Field(description="When the time begins.")
    seconds: int = Field(ge=3600, le=2_592_000, description="Until the files expire.")


class BatchRequest(Bounded, extra="allow", strict=True):
    input_file_id: str = Field(
        min_length=1, max_length=256, description="An upload with the purpose batch: JSON lines."
    )
    endpoint: Endpoint = Field(description="The route of all requests in the file.")
    completion_window: Literal["24h"] = Field(description="After it the batch expires.")
    metadata: Metadata | None = Field(default=None, description="Kept with the batch.")
    output_expires_after: OutputExpiry | None = Field(
        default=None, description="When the files of the batch expire."
    )


def batches_router(core: Core, batches: BatchService) -> APIRouter:
    """The routes of batches."""
    router = APIRouter(tags=["batches"])

    @router.post(PATH, openapi_extra=body_schema(BatchRequest))
    async def create_batch(request: Request) -> Response:
        """Run the requests of an uploaded file at low priority; their answers are a file."""
        context = context_of(request.scope)
        body = await read_json(request, BatchRequest, core.settings)
        warn_unknown(list(body.model_extra or ()), context.warnings)
        file = await core.uploads.get(body.input_file_id, context.access)
        _check_input(file)
        expiry = body.output_expires_after
        batch = await batches.create(
            file,
            body.endpoint,
            body.completion_window,
            body.metadata,
            None if expiry is None else expiry.seconds,
            context.access.tenant,
        )
        return json_response(batch)

    @router.get(PATH)
    async def list_batches(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=100, description="Batches at most.")] = 20,
        after: Annotated[str | None, Query(description="The last id of the page before.")] = None,
    ) -> Response:
        """The batches of the caller's tenant, newest first."""
        access = access_of(request)
        return json_response(await batches.page(access, limit, after))

    @router.get(f"{PATH}/{{batch_id}}")
    async def get_batch(request: Request, batch_id: str) -> Response:
        """A batch in its current state."""
        return json_response(await batches.get(batch_id, access_of(request)))

    @router.post(f"{PATH}/{{batch_id}}/cancel")
    async def cancel_batch(request: Request, batch_id: str) -> Response:
        """End a batch; the answers that it has become files."""
        return json_response(await batches.cancel(batch_id, access_of(request)))

    return router


def _check_input(file: FileObject) -> None:
    """Raises InvalidInput for a file that was not uploaded for a batch."""
    if file.purpose != "batch":
        text = f"the file {file.id!r} has the purpose {file.purpose!r}, not 'batch'"
        raise InvalidInput(text, param="input_file_id")

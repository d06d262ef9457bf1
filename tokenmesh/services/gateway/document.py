"""The OpenAPI document: adds bodies, responses and the API key to what FastAPI generates.

FastAPI cannot describe these: routes read and write their bodies themselves, with msgspec. A field
that is known but not supported is described by the values that request nothing.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgspec
from fastapi import FastAPI
from pydantic import BaseModel

from tokenmesh.services.gateway.apis.anthropic.writer import MessageBody, TokenCount
from tokenmesh.services.gateway.apis.audio.response import Transcription, VerboseTranscription
from tokenmesh.services.gateway.apis.batches.records import BatchList, BatchObject
from tokenmesh.services.gateway.apis.cohere.writer import CohereChat
from tokenmesh.services.gateway.apis.openai import shapes
from tokenmesh.services.gateway.apis.openai.sampling_fields import NotServed, marked
from tokenmesh.services.gateway.apis.pooling import shapes as numbers
from tokenmesh.services.gateway.apis.pooling.generative import GenerativeScores
from tokenmesh.services.gateway.apis.pooling.moderations import ModerationResults
from tokenmesh.services.gateway.apis.responses.shapes import (
    InputItems,
    InputTokens,
    Response,
    ResponseDeleted,
)
from tokenmesh.services.gateway.apis.scale_out.shapes import (
    DerenderedChat,
    DerenderedChunk,
    DerenderedCompletion,
    GenerateResponse,
    RenderedRequest,
)
from tokenmesh.services.gateway.core.api import AnswerShape
from tokenmesh.services.gateway.core.api_table import ApiTable
from tokenmesh.services.gateway.core.files.uploads import FileDeleted, FileList, FileObject
from tokenmesh.services.gateway.core.http.body import SCHEMA_REF
from tokenmesh.services.gateway.core.http.errors import ErrorBody
from tokenmesh.services.gateway.core.tenancy.auth import OPEN_PATHS

_KEY: Final = "api_key"
_STREAM: Final = "text/event-stream"
_TEXT: Final = {"schema": {"type": "string"}}

_STRUCTS: Final[dict[tuple[str, str], type[msgspec.Struct]]] = {
    ("post", "/v1/chat/completions"): shapes.ChatCompletion,
    ("post", "/v1/chat/completions/batch"): shapes.ChatCompletion,
    ("post", "/v1/completions"): shapes.Completion,
    ("post", "/v1/responses"): Response,
    ("post", "/v1/responses/input_tokens"): InputTokens,
    ("get", "/v1/responses/{response_id}"): Response,
    ("delete", "/v1/responses/{response_id}"): ResponseDeleted,
    ("post", "/v1/responses/{response_id}/cancel"): Response,
    ("get", "/v1/responses/{response_id}/input_items"): InputItems,
    ("post", "/v1/messages"): MessageBody,
    ("post", "/cohere/v2/chat"): CohereChat,
    ("post", "/v2/chat"): CohereChat,
    ("post", "/cohere/v2/chat/render"): RenderedRequest,
    ("post", "/v1/messages/count_tokens"): TokenCount,
    ("get", "/v1/models"): shapes.ModelList,
    ("get", "/v1/models/{model_id}"): shapes.Model,
    ("post", "/tokenize"): shapes.TokenizeResult,
    ("post", "/detokenize"): shapes.DetokenizeResult,
    ("post", "/v1/moderations"): ModerationResults,
    ("post", "/generative_scoring"): GenerativeScores,
    ("post", "/v1/files"): FileObject,
    ("get", "/v1/files"): FileList,
    ("get", "/v1/files/{file_id}"): FileObject,
    ("post", "/v1/batches"): BatchObject,
    ("get", "/v1/batches"): BatchList,
    ("get", "/v1/batches/{batch_id}"): BatchObject,
    ("post", "/v1/batches/{batch_id}/cancel"): BatchObject,
    ("delete", "/v1/files/{file_id}"): FileDeleted,
    ("post", "/v1/chat/completions/render"): RenderedRequest,
    ("post", "/v1/messages/render"): RenderedRequest,
    ("post", "/v1/responses/render"): RenderedRequest,
    ("post", "/inference/v1/generate"): GenerateResponse,
    ("post", "/v1/embeddings"): numbers.EmbeddingList,
    ("post", "/v1/embed"): numbers.CohereEmbedResponse,
    ("post", "/v2/embed"): numbers.CohereEmbedResponse,
    ("post", "/pooling"): numbers.PoolingList,
    ("post", "/classify"): numbers.ClassificationList,
    ("post", "/score"): numbers.ScoreList,
    ("post", "/v1/score"): numbers.ScoreList,
    ("post", "/rerank"): numbers.RerankResponse,
    ("post", "/v1/rerank"): numbers.RerankResponse,
    ("post", "/v2/rerank"): numbers.RerankResponse,
}
_SEVERAL: Final[dict[tuple[str, str], Callable[[], dict[str, Any]]]] = {
    ("post", "/v1/completions/render"): lambda: {"type": "array", "items": _ref(RenderedRequest)},
    ("post", "/v1/chat/completions/derender"): lambda: {
        "anyOf": [_ref(DerenderedChat), _ref(DerenderedChunk)]
    },
    ("post", "/v1/completions/derender"): lambda: {
        "anyOf": [_ref(DerenderedCompletion), _ref(DerenderedChunk)]
    },
    ("post", "/v1/audio/transcriptions"): lambda: {
        "anyOf": [_ref(Transcription), _ref(VerboseTranscription)]
    },
    ("post", "/v1/audio/translations"): lambda: {
        "anyOf": [_ref(Transcription), _ref(VerboseTranscription)]
    },
}
"""Schemas of responses that are not one struct."""
_MEMBERS: Final = (
    Transcription,
    VerboseTranscription,
    RenderedRequest,
    DerenderedChat,
    DerenderedCompletion,
    DerenderedChunk,
)
_STREAMED: Final = frozenset(
    [
        ("post", "/v1/chat/completions"),
        ("post", "/v1/completions"),
        ("post", "/v1/messages"),
        ("post", "/cohere/v2/chat"),
        ("post", "/v2/chat"),
        ("post", "/v1/responses"),
        ("post", "/v1/audio/transcriptions"),
        ("post", "/v1/audio/translations"),
        ("post", "/inference/v1/generate"),
        ("get", "/v1/responses/{response_id}"),
    ]
)
_MEDIA: Final = {
    ("get", "/metrics"): "text/plain",
    ("get", "/v1/files/{file_id}/content"): "application/octet-stream",
}
_EMPTY: Final = frozenset({("get", "/livez"), ("post", "/inference/v1/abort_requests")})
_ERRORS: Final = {"4XX": "The request cannot be served.", "5XX": "The mesh cannot serve it now."}
_NOTHING: Final[dict[str, dict[str, Any]]] = {
    "object": {"maxProperties": 0},
    "array": {"maxItems": 0},
    "string": {"maxLength": 0},
    "boolean": {"const": False},
    "integer": {"const": 0},
}
_ANY_NOTHING: Final[dict[str, Any]] = {"enum": [None, False, 0, "", [], {}]}
_VALUES: Final[dict[str, list[Any]]] = {
    "service_tier": [None, "auto", "default"],
    "mm_payload": [None, "tensors"],
    "function_call": [None, "none", "auto"],
    "web_search_options": [None],
    "best_of": [None, 1],
}


def complete(
    app: FastAPI, models: Sequence[type[BaseModel]], *, apis: ApiTable, has_keys: bool
) -> None:
    """Extend `app.openapi`. `models`: of all request bodies."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = make()
            components = document.setdefault("components", {})
            schemas = components.setdefault("schemas", {})
            schemas |= body_components(models) | response_components(apis)
            for path, operations in document["paths"].items():
                for method, operation in operations.items():
                    operation["responses"] = _responses_of(apis, method, path)
                    if has_keys and path not in OPEN_PATHS:
                        operation["security"] = [{_KEY: []}]
            if has_keys:
                components["securitySchemes"] = {_KEY: {"type": "http", "scheme": "bearer"}}
        return make()

    app.openapi = openapi  # type: ignore[method-assign]


def response_components(apis: ApiTable) -> dict[str, Any]:
    """The schemas of all responses by name."""
    answers = [answer for api in apis.apis for answer in api.answers.values()]
    own = [kind for answer in answers for kind in answer.kinds]
    errors = [api.error_body for api in apis.apis]
    kinds: list[type[msgspec.Struct]] = [ErrorBody, *errors, *_STRUCTS.values(), *_MEMBERS, *own]
    components: dict[str, Any] = {}
    for kind in dict.fromkeys(kinds):
        # One by one: classes of different APIs have the same name.
        _, found = msgspec.json.schema_components([kind], ref_template=_ref_template(kind))
        components |= {_name(kind, name): schema for name, schema in found.items()}
    return components


def _responses_of(apis: ApiTable, method: str, path: str) -> dict[str, Any]:
    """The `responses` of an operation."""
    api = apis.find(path)
    error = ErrorBody if api is None else api.error_body
    responses: dict[str, Any] = {
        status: {"description": text, "content": {"application/json": {"schema": _ref(error)}}}
        for status, text in _ERRORS.items()
    }
    responses["200"] = {"description": "Done.", **_content(apis, method, path)}
    return responses


def _content(apis: ApiTable, method: str, path: str) -> dict[str, Any]:
    operation = (method, path)
    answer = next((api.answers[operation] for api in apis.apis if operation in api.answers), None)
    if answer is not None:
        return _content_of(answer)
    if operation in _EMPTY:
        return {}
    if operation in _MEDIA:
        return {"content": {_MEDIA[operation]: _TEXT}}
    kind = _STRUCTS.get(operation)
    schema = _ref(kind) if kind else _SEVERAL.get(operation, dict[str, Any])()
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    if operation in _STREAMED:
        content[_STREAM] = _TEXT
    return {"content": content}


def _content_of(answer: AnswerShape) -> dict[str, Any]:
    if answer.is_empty:
        return {}
    if answer.media_type is not None:
        return {"content": {answer.media_type: _TEXT}}
    schemas = [_ref(kind) for kind in answer.kinds]
    schema: dict[str, Any] = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    if not schemas:
        schema = {}
    if answer.is_list:
        schema = {"type": "array", "items": schema}
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    if answer.streams:
        content[_STREAM] = _TEXT
    return {"content": content}


def _ref(kind: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": _ref_template(kind).format(name=kind.__name__)}


def _ref_template(kind: type[msgspec.Struct]) -> str:
    return f"#/components/schemas/{_name(kind, '{name}')}"


def _name(kind: type[msgspec.Struct], name: str) -> str:
    """Prefixed by the API: names of request bodies and other APIs would collide."""
    package = kind.__module__.split(".")[-2]
    # OpenAI's format of errors is also that of the gateway's own routes.
    return f"{'openai' if package == 'http' else package}.{name}"


def body_components(models: Iterable[type[BaseModel]]) -> dict[str, Any]:
    """The referenced schemas by name."""
    components: dict[str, Any] = {}
    for model in models:
        schema = model.model_json_schema(ref_template=SCHEMA_REF)
        # A model that is also a body itself keeps its own description.
        components = schema.pop("$defs", {}) | components
        _narrow(schema["properties"], marked(model, NotServed))
        components[model.__name__] = schema
    return components


def _narrow(properties: dict[str, Any], names: Iterable[str]) -> None:
    """Restrict the schemas of unsupported fields, in place."""
    for name in names:
        if name in _VALUES:
            properties[name] = {**properties[name], "enum": _VALUES[name]}
        elif name in properties and name != "modalities":
            properties[name] = _nothing(properties[name])


def _nothing(schema: dict[str, Any]) -> dict[str, Any]:
    if "anyOf" in schema:
        return {**schema, "anyOf": [_nothing(each) for each in schema["anyOf"]]}
    kind = schema.get("type")
    if kind is None:
        return {**schema, **_ANY_NOTHING}
    return {**schema, **_NOTHING.get(kind, {})}

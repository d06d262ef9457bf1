"""The OpenAPI document: adds bodies, responses and the API key to what FastAPI generates.

FastAPI cannot describe these: routes read and write their bodies themselves, with msgspec. A field
that is known but not supported is described by the values that request nothing.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
from fastapi import FastAPI
from pydantic import BaseModel

from tokenmesh.services.gateway.apis.openai.sampling_fields import NotServed, marked
from tokenmesh.services.gateway.core.api import AnswerShape
from tokenmesh.services.gateway.core.api_table import ApiTable
from tokenmesh.services.gateway.core.http.body import SCHEMA_REF
from tokenmesh.services.gateway.core.http.errors import ErrorBody
from tokenmesh.services.gateway.core.tenancy.auth import OPEN_PATHS

_KEY: Final = "api_key"
_STREAM: Final = "text/event-stream"
_TEXT: Final = {"schema": {"type": "string"}}

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
    kinds: list[type[msgspec.Struct]] = [ErrorBody, *errors, *own]
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
    found = (api.answers[operation] for api in apis.apis if operation in api.answers)
    answer = next(found, AnswerShape())
    if answer.is_empty:
        return {}
    if answer.media_type is not None:
        return {"content": {answer.media_type: _TEXT}}
    schemas = [_ref(kind) for kind in answer.kinds]
    schema: dict[str, Any] = {"anyOf": schemas} if len(schemas) > 1 else {}
    if len(schemas) == 1:
        schema = dict(schemas[0])
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

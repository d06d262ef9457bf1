"""Request bodies in the OpenAPI document: a route names its model, the document has its schema.

A field that is known but not supported is described by the values that request nothing.
"""

from collections.abc import Iterable
from typing import Any, Final

from pydantic import BaseModel

from tokenmesh.services.gateway.openai.sampling_fields import NotServed, marked

_REF: Final = "#/components/schemas/{model}"
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


def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The `openapi_extra` of a route."""
    return _body({"$ref": _REF.format(model=model.__name__)})


def any_body_schema(models: Iterable[type[BaseModel]]) -> dict[str, Any]:
    """The `openapi_extra` of a route that accepts several bodies."""
    return _body({"anyOf": [{"$ref": _REF.format(model=each.__name__)} for each in models]})


def _body(schema: dict[str, Any]) -> dict[str, Any]:
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}}


def body_components(models: Iterable[type[BaseModel]]) -> dict[str, Any]:
    """The referenced schemas by name."""
    components: dict[str, Any] = {}
    for model in models:
        schema = model.model_json_schema(ref_template=_REF)
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

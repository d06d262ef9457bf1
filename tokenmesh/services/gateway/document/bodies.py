"""Request bodies: a route names its model, the document holds the model's schema."""

from collections.abc import Iterable
from typing import Any, Final

from pydantic import BaseModel

from tokenmesh.services.gateway.document.not_served import narrow
from tokenmesh.services.gateway.openai.sampling_fields import NotServed, marked

_REF: Final = "#/components/schemas/{model}"


def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """What a route passes as `openapi_extra`."""
    return _body({"$ref": _REF.format(model=model.__name__)})


def any_body_schema(models: Iterable[type[BaseModel]]) -> dict[str, Any]:
    """The same for a route that takes any of several bodies."""
    return _body({"anyOf": [{"$ref": _REF.format(model=each.__name__)} for each in models]})


def _body(schema: dict[str, Any]) -> dict[str, Any]:
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}}


def body_components(models: Iterable[type[BaseModel]]) -> dict[str, Any]:
    """The schemas that those refer to, by name."""
    components: dict[str, Any] = {}
    for model in models:
        schema = model.model_json_schema(ref_template=_REF)
        # A body inside of another one is described as where it is a body itself.
        components = schema.pop("$defs", {}) | components
        narrow(schema["properties"], marked(model, NotServed))
        components[model.__name__] = schema
    return components

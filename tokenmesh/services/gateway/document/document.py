"""complete: adds bodies, answers, errors and the API key to the document that FastAPI makes."""

from collections.abc import Sequence
from typing import Any, Final

from fastapi import FastAPI
from pydantic import BaseModel

from tokenmesh.services.gateway.document.answers import answer_components, answers_of
from tokenmesh.services.gateway.document.bodies import body_components
from tokenmesh.services.gateway.tenancy.key_ring import OPEN_PATHS

_KEY: Final = "api_key"


def complete(app: FastAPI, models: Sequence[type[BaseModel]], *, has_keys: bool) -> None:
    """Change the document when it is first asked for. `models`: of all request bodies."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = make()
            components = document.setdefault("components", {})
            schemas = components.setdefault("schemas", {})
            schemas |= body_components(models) | answer_components()
            for path, operations in document["paths"].items():
                for method, operation in operations.items():
                    operation["responses"] = answers_of(method, path)
                    if has_keys and path not in OPEN_PATHS:
                        operation["security"] = [{_KEY: []}]
            if has_keys:
                components["securitySchemes"] = {_KEY: {"type": "http", "scheme": "bearer"}}
        return make()

    app.openapi = openapi  # type: ignore[method-assign]

"""Gives schemathesis, which loads it, the name of the served model: it cannot guess it."""

from typing import Any

import schemathesis

_MODEL = "tokenmesh-demo"


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Nearly every body names the model that is there; empty names stay what they are."""
    if isinstance(body, dict) and isinstance(body.get("model"), str) and body["model"]:
        return {**body, "model": _MODEL}
    return body


@schemathesis.hook
def map_path_parameters(context: Any, path_parameters: Any) -> Any:
    """The same for paths."""
    if isinstance(path_parameters, dict) and "model_id" in path_parameters:
        return {**path_parameters, "model_id": _MODEL}
    return path_parameters

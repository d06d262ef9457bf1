"""Field names: where in a GenerateRequest the fields are that an error names."""

import copy

from tokenmesh.services.gateway.scale_out.generate_request import GenerateRequest, GenerateSampling
from tokenmesh.shared.errors import TokenMeshError


def own_names(error: TokenMeshError) -> TokenMeshError:
    """The same error; `prompt` is `token_ids` here, sampling fields are in `sampling_params`."""
    root = (error.param or "").partition(".")[0]
    if root == "prompt":
        param = "token_ids"
    elif root in GenerateSampling.model_fields and root not in GenerateRequest.model_fields:
        param = f"sampling_params.{error.param}"
    else:
        return error
    renamed = copy.copy(error)
    renamed.param = param
    return renamed

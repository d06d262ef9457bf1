"""Names of tensors in an adapter's file: which module a matrix is for, and why one is refused."""

import re
from collections.abc import Container
from dataclasses import dataclass
from typing import Final

from tokenmesh.engine.adapters.peft_config import refusal
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.tensor_file import TensorFile

START: Final = "base_model.model."
"""This is the beginning of every name that PEFT writes."""
_KEY: Final = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<matrix>[AB])\.weight")
_TOWERS: Final = re.compile(
    r"(^|\.)(visual|vision_\w+|audio_\w+|image_\w+|multi_modal_projector|embed_vision|mlp1)\."
)
_HEADS: Final = frozenset(
    {"classifier", "embed_out", "embedding_proj_layer", "lm_head", "output", "score"}
)
_NOT_SERVED: Final = "not served; merge it into the checkpoint"
_HINTS: Final = {
    "embed_tokens.": "adapters of embeddings are not served",
    "lm_head.": "adapters of heads are not served",
    "lora_embedding_": "adapters of embeddings are not served",
    "lora_magnitude_vector": f"DoRA is {_NOT_SERVED}",
    "lora_A.bias": "biases are not served",
    "lora_B.bias": "biases are not served",
}


@dataclass(slots=True)
class Pair:
    """Names of the two tensors of one module."""

    a: str = ""
    b: str = ""


def split_names(file: TensorFile, saved: Container[str]) -> tuple[dict[str, Pair], dict[str, str]]:
    """The pairs by module, and the names of whole tensors by parameter.

    saved: parameters that may be there whole. Raises InvalidInput for any other tensor.
    """
    pairs: dict[str, Pair] = {}
    whole: dict[str, str] = {}
    for name in file:
        match = _KEY.fullmatch(name)
        if match is not None:
            pair = pairs.setdefault(match["module"], Pair())
            setattr(pair, match["matrix"].lower(), name)
        elif name.startswith(START) and (parameter := name[len(START) :]) in saved:
            whole[parameter] = name
        else:
            known = (why for part, why in _HINTS.items() if part in name)
            why = next(known, "it is not a matrix of a linear layer, as PEFT names them")
            raise refusal(file.path, name, f"is not served: {why}")
    if not pairs and not whole:
        raise InvalidInput(f"{file.path.name}: holds no tensor", param="lora_path")
    return pairs, whole


def why_missing(module: str) -> str:
    """Why a module without a site cannot have an adapter."""
    if module.rpartition(".")[2] in _HEADS:
        return f"adapters of heads are {_NOT_SERVED}"
    if _TOWERS.search(module):
        return f"adapters of towers are {_NOT_SERVED}"
    return f"the model has no linear layer {module}"

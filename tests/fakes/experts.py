"""The stacks of experts that a loaded model computes with."""

from typing import Any

from tokenmesh.engine.exec.loaded_model import RunnableModel
from tokenmesh.engine.models.native.decoder import Decoder
from tokenmesh.kernels.native import CodedExperts


def stacks_of(model: RunnableModel) -> list[Any]:
    """Return the weights of the first product and of the second of each layer, in their order."""
    return stacks_in(model.resident._model)


def stacks_in(own: Any) -> list[Any]:
    """The same of a `LanguageModel`."""
    if isinstance(own, Decoder):
        mlps: list[Any] = [layer.mlp for layer in own.layers]
        found = [(each.w13, each.w2) for each in mlps if hasattr(each, "w13")]
    else:
        ports: list[Any] = [each for each in own.tree.body.modules() if "port" in vars(each)]
        found = [each.port[:2] for each in ports if hasattr(each, "is_transposed")]
    return [each for pair in found for each in pair]


def coded_experts(model: RunnableModel) -> list[CodedExperts]:
    """All stacks, which must be codes."""
    stacks = stacks_of(model)
    assert stacks
    assert all(isinstance(each, CodedExperts) for each in stacks)
    return stacks

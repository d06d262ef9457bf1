"""Some trees multiply embeddings by a number only where they make them from token ids.

Here they are given embeddings, as prompts may hold some that are of no token, so `Tree.embed`
multiplies. The number is measured in front of the first layer and then read from the tree or its
config, since a measured one would round differently.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from tokenmesh.engine.models.tree.media.language import language_body
from tokenmesh.engine.models.tree.run import UnservedModel

NEEDS_IDS: Final = "its code needs token ids in addition to their embeddings"
_SAME: Final = 1e-6
"""Largest relative distance between two runs of the same code; it holds for all dtypes, as nothing
but tables, products of single numbers and norms is in front of the first layer."""
_NEAR: Final = 1e-2
"""It says how far a factor may be from the fitted one, which is rounded as the embeddings are."""


class _Reached(BaseException):
    """The first layer has been called; no code of a model catches it."""


@torch.inference_mode()
def embedding_factor(
    model: PreTrainedModel, ids: torch.Tensor, states: Sequence[torch.Tensor] = ()
) -> float:
    """The factor that is lost when the language model is given embeddings; 1.0 where none is.

    Call it before the tree is adapted. ids [T]; states: of an encoder, for each prompt. Raises
    UnservedModel where ids add something else. Trees whose first layer is not found are left to
    the check of a loaded tree.
    """
    body: Any = language_body(model)
    embedding: Any = model.get_input_embeddings()
    layers = _layers_of(body)
    encoded = {"encoder_outputs": (states[0][None],)} if states else {}
    seen = {"encoder_hidden_states": states[0][None]} if states else {}

    def by_embeddings(factor: float) -> torch.Tensor | None:
        rows = embedding(ids[None]) * factor
        return _first_input(layers, lambda: body(inputs_embeds=rows, use_cache=False, **seen))

    by_ids = _first_input(layers, lambda: model(input_ids=ids[None], use_cache=False, **encoded))
    plain = by_embeddings(1.0)
    if by_ids is None or plain is None or by_ids.shape != plain.shape:
        return 1.0
    if _distance(plain, by_ids) <= _SAME:
        return 1.0
    # what both runs add to the embeddings, such as positions, cancels out
    rows = embedding(ids[None]).double()
    fitted = 1.0 + float(((by_ids.double() - plain) * rows).sum() / rows.square().sum())
    for factor in sorted(_numbers_of(model, body), key=lambda each: abs(each - fitted)):
        if abs(factor - fitted) > _NEAR * abs(fitted):
            break
        scaled = by_embeddings(factor)
        if scaled is not None and _distance(scaled, by_ids) <= _SAME:
            return factor
    raise UnservedModel(NEEDS_IDS)


def _layers_of(body: torch.nn.Module) -> list[torch.nn.Module]:
    lists = (module for module in body.modules() if isinstance(module, torch.nn.ModuleList))
    return list(dict.fromkeys(layer for each in lists for layer in each))


def _first_input(
    layers: Sequence[torch.nn.Module], forward: Callable[[], object]
) -> torch.Tensor | None:
    """The hidden states that the first layer to run is given; None: none runs, or all fails."""
    found: list[torch.Tensor] = []

    def note(_layer: torch.nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        hidden = named.get("hidden_states", args[0] if args else None)
        if isinstance(hidden, torch.Tensor) and hidden.dim() >= 3:
            found.append(hidden.clone())
            raise _Reached

    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    try:
        forward()
    except _Reached:
        return found[0]
    except Exception:  # whatever its code raises without what a step gives it
        return None
    finally:
        for hook in hooks:
            hook.remove()
    return None


def _numbers_of(*modules: Any) -> Iterator[float]:
    """Numbers that a tree may multiply by: of outer modules, of their configs, the root of H."""
    for module in dict.fromkeys(modules):
        config = module.config.get_text_config()
        for values in (vars(module), vars(config)):
            yield from (
                float(each)
                for each in values.values()
                if isinstance(each, int | float) and not isinstance(each, bool)
            )
        yield float(config.hidden_size) ** 0.5


def _distance(ours: torch.Tensor, expected: torch.Tensor) -> float:
    return float((ours.double() - expected).norm() / expected.double().norm())

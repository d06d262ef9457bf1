"""Define what a tree does around its layers, read in float32 with stand-ins for the layers."""

from dataclasses import dataclass
from typing import Any, Final

import torch

from tokenmesh.engine.layers.rotary import RopeConfig, Rotary
from tokenmesh.engine.models.promotion.read_heads import Unread
from tokenmesh.engine.models.promotion.read_layer import LayerCall
from tokenmesh.engine.models.tree.attention import PORT
from tokenmesh.engine.models.tree.model import HfModel
from tokenmesh.engine.models.tree.recognise import (
    Given,
    Norm,
    is_same,
    norm_of,
    random_rows,
)
from tokenmesh.engine.models.tree.tree import RowRope
from tokenmesh.kernels.rms_norm import rms_norm

_POSITIONS: Final = (0, 1, 5, 77, 1000)
"""Positions of the pass; the last one of the model is added."""
_ROUND: Final = 1e-6
_ROWS: Final = 256
"""Rows of the embedding table that are tried."""


@dataclass(frozen=True, slots=True, eq=False)
class Skeleton:
    """A tree without the contents of its layers."""

    layers: list[torch.nn.Module]
    calls: list[LayerCall]
    """It says how each is called, in float32, at `positions`."""
    positions: torch.Tensor
    rotaries: list[Rotary]
    norm: Norm
    head: torch.nn.Linear
    is_tied: bool
    embedding_multiplier: float
    multiplies_patches: bool
    logits_divisor: float
    logits_softcap: float | None


def read_skeleton(model: HfModel) -> Skeleton:
    tree = model.tree
    layers = _layers_of(tree.body, len(model.keeps))
    last_position = model.facts.max_position - 1
    chosen, device = [*_POSITIONS, last_position], model.device
    positions = torch.tensor([min(each, last_position) for each in chosen], device=device)
    embeddings = random_rows(1, len(positions), model.facts.hidden_size, device=device)
    calls, seen, out = _calls_of(layers, lambda: tree.hidden_of(embeddings, positions[None]))
    norm = _norm_of(tree.body, layers, seen[-1], out)
    of_all = _factor(seen[0], embeddings, "its embeddings")
    of_tokens = _multiplier_of(tree.embedding) * tree.embedding_factor
    if of_all != 1.0 and of_tokens != 1.0:
        raise Unread("its embeddings are multiplied twice")
    head, divisor, softcap = _head_of(model)
    return Skeleton(
        layers=layers,
        calls=calls,
        positions=positions,
        rotaries=_rotaries_of(tree.body, calls, positions),
        norm=norm,
        head=head,
        is_tied=head.weight is tree.embedding.weight,
        embedding_multiplier=of_all * of_tokens,
        # the body multiplies whatever it is given, the table its own rows
        multiplies_patches=of_all != 1.0,
        logits_divisor=divisor,
        logits_softcap=softcap,
    )


def _layers_of(body: torch.nn.Module, count: int) -> list[torch.nn.Module]:
    """The layers: the module list whose modules have one attention each."""
    for module in body.modules():
        layers = list(module.children())
        if isinstance(module, torch.nn.ModuleList) and len(layers) == count:
            ports = [sum(PORT in vars(part) for part in each.modules()) for each in layers]
            if ports == [1] * count:
                return layers
    raise Unread("it has no list of layers with one attention each")


def _calls_of(
    layers: list[torch.nn.Module], forward: Any
) -> tuple[list[LayerCall], list[torch.Tensor], torch.Tensor]:
    """Calls, what each layer was given with the last one's result at the end, the final states."""
    calls: list[LayerCall] = []
    seen: list[torch.Tensor] = []

    def stand_in(*args: Any, **named: Any) -> torch.Tensor:
        hidden: torch.Tensor = named["hidden_states"] if "hidden_states" in named else args[0]
        if seen and hidden is not seen[-1]:
            raise Unread("something happens between its layers")
        if not seen:
            seen.append(hidden)
        calls.append(LayerCall(args, named))
        seen.append(hidden.clone())
        return seen[-1]

    try:
        for layer in layers:
            _set_forward(layer, stand_in)
        out = forward()
    except Unread:
        raise
    except Exception as error:  # whatever a body raises whose layers return something else
        raise Unread(f"its layers cannot be taken out: {error}") from error
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)
    if len(calls) != len(layers):
        raise Unread("its layers are not called one after the other")
    return calls, seen, out


def _set_forward(module: Any, forward: Any) -> None:
    if "forward" in vars(module):
        raise Unread("its layers keep a state")
    module.forward = forward


def _norm_of(
    body: torch.nn.Module, layers: list[torch.nn.Module], x: torch.Tensor, out: torch.Tensor
) -> Norm:
    inside = {part for layer in layers for part in layer.modules()}
    for module in body.modules():
        found = None if module in inside else norm_of(module)
        if found is None or len(found.weight) != x.shape[-1]:
            continue
        if is_same(out, rms_norm(x, found.weight, found.eps)):
            return found
    raise Unread("it does not end with an RMS norm")


def _factor(scaled: torch.Tensor, given: torch.Tensor, what: str) -> float:
    """The number by which all of `given` was multiplied."""
    factor = _fit(scaled, given)
    if scaled.shape != given.shape or not is_same(scaled, given * factor):
        raise Unread(f"{what} are not multiplied by one number")
    return factor


def _fit(scaled: torch.Tensor, given: torch.Tensor) -> float:
    """The number that brings `given` closest to `scaled`."""
    factor = float((scaled.double() * given).sum() / (given.double() * given).sum())
    if not factor:
        raise Unread("what it computes from random numbers is 0")
    return 1.0 if abs(factor - 1) < _ROUND else factor


def _multiplier_of(embedding: Any) -> float:
    """Return what a table multiplies its rows by, exactly as they are rounded."""
    if not isinstance(embedding, torch.nn.Embedding) or len(list(embedding.parameters())) != 1:
        raise Unread("its embedding is more than a table")
    table = embedding.weight.detach()
    ids = torch.linspace(0, len(table) - 1, min(len(table), _ROWS)).long().to(table.device)
    rows, made = table[ids], embedding(ids)
    numbers = [*vars(embedding).values(), *(b.item() for b in embedding.buffers() if b.dim() == 0)]
    for number in (1.0, *(n for n in numbers if isinstance(n, float))):
        factor = float(torch.tensor(number, dtype=table.dtype))
        if embedding.max_norm is None and torch.equal(rows * factor, made):
            return factor
    raise Unread("its embedding is more than a table and a factor")


def _head_of(model: HfModel) -> tuple[torch.nn.Linear, float, float | None]:
    """The last projection, what its results are divided by, and the softcap of that."""
    tree = model.tree.model
    head = tree.get_output_embeddings()
    if type(head) is not torch.nn.Linear or head.bias is not None:
        raise Unread("its head is more than a product")
    hidden = random_rows(4, model.facts.hidden_size, device=model.device)
    # of all sizes: what bounds logits shows
    sizes = torch.tensor([[[1e-2], [1.0], [100.0], [1e6]]], device=model.device)
    probe = random_rows(1, 4, model.facts.vocab_size, device=model.device) * sizes
    given = Given(probe.clone())
    tree.set_output_embeddings(given)
    try:
        logits = model.logits(hidden)
    finally:
        tree.set_output_embeddings(head)
    if given.x is None or not is_same(given.x, hidden[None]):
        raise Unread("its head reads something else than the final states")
    softcap = float(logits[-1].abs().max())
    factor = _fit(logits[0], probe[0, 0])
    if is_same(logits, softcap * (factor * probe[0] / softcap).tanh()):
        return head, 1 / factor, softcap
    return head, 1 / _factor(logits, probe[0], "its logits"), None


def _rotaries_of(
    body: torch.nn.Module, calls: list[LayerCall], positions: torch.Tensor
) -> list[Rotary]:
    """One for each kind of turns that a layer is called with."""
    rotaries: list[Rotary] = []
    for cosine, sine in _turns_of(calls):
        scale = float((cosine**2 + sine**2).sqrt().mean())
        candidates = [*rotaries, *_candidates(body, cosine.shape[-1], scale)]
        for rotary in candidates:
            turns = rotary.turns(positions, positions + 1)[:, 0]
            if _is_turn(turns, cosine, sine):
                break
        else:
            raise Unread("its positions rotate queries and keys in an unsupported way")
        if rotary not in rotaries:
            rotaries.append(rotary)
    return rotaries


def _turns_of(calls: list[LayerCall]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Cosines and sines [1, T, R] that layers are given, each once."""
    pairs = {}
    for call in calls:
        for each in (*call.args, *call.named.values()):
            if isinstance(each, tuple) and len(each) == 2:
                pairs[id(each[0])] = each
    return list(pairs.values())


def _candidates(body: torch.nn.Module, width: int, scale: float) -> list[Rotary]:
    found = []
    for module in body.modules():
        if isinstance(module, RowRope):
            found.append(module.rotary)
        for buffer in module.buffers(recurse=False):
            # turns come once for each pair or once for each number
            if buffer.dtype == torch.float32 and buffer.shape in ((width // 2,), (width,)):
                factor = 1.0 if abs(scale - 1) < _ROUND else scale
                dim = 2 * len(buffer)
                config = RopeConfig("default", 0.0, dim, 0, 0, attention_factor=factor)
                found.append(Rotary(config, frequencies=buffer))
    return found


def _is_turn(turns: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> bool:
    """Return whether the numbers, or the first or every second of them, are those of the turns."""
    if cosine.shape[-1] not in (turns.shape[-1], 2 * turns.shape[-1]):
        return False
    parts = (slice(None, turns.shape[-1]), slice(None, None, cosine.shape[-1] // turns.shape[-1]))
    return any(
        is_same(cosine[0, :, part], turns.real) and is_same(sine[0, :, part], turns.imag)
        for part in parts
    )

"""A module tree of transformers read as a native decoder, where both compute the same.

Each kind of layer is read and run in both forms on random numbers in float32. A tree whose layers
all agree becomes a `Decoder`, and with it a program of C kernels; else it stays as it is.
"""

import copy
import dataclasses
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any, Final

import torch

from tokenmesh.engine.adapters.sites import AdapterSites, TurnedRows
from tokenmesh.engine.models.keeps import one_group
from tokenmesh.engine.models.kv_store import KvStore, make_store
from tokenmesh.engine.models.native.attention import Attention, TurnedStep
from tokenmesh.engine.models.native.build_program import build_program
from tokenmesh.engine.models.native.config import DecoderConfig, LayerConfig
from tokenmesh.engine.models.native.decoder import Decoder, DecoderLayer
from tokenmesh.engine.models.promotion.native_parts import (
    LayerSites,
    linear_of,
    native_mlp,
)
from tokenmesh.engine.models.promotion.read_experts import in_dtype
from tokenmesh.engine.models.promotion.read_heads import Heads, Unread
from tokenmesh.engine.models.promotion.read_layer import LayerCall, Reading, read_layer
from tokenmesh.engine.models.promotion.skeleton import Skeleton, read_skeleton
from tokenmesh.engine.models.tree.attention import PORT, Port
from tokenmesh.engine.models.tree.model import HfModel
from tokenmesh.engine.models.tree.quantized.deferred_experts import settle
from tokenmesh.engine.models.tree.quantized.expert_codes import is_experts
from tokenmesh.engine.models.tree.recognise import (
    FIRST_PAGE,
    first_step,
    norm_of,
    random_rows,
)
from tokenmesh.engine.models.tree.swap import packed
from tokenmesh.kernels.native import NativeCodes, NativeWeight
from tokenmesh.kernels.rope import interleave_rows
from tokenmesh.shared.allocator import trim_heap

TOLERANCE: Final = 1e-5
"""Largest relative error between both forms of a layer, in float32."""
_OWN: Final = "tokenmesh_"
"""Attributes that loading adds to modules begin so."""


def promote(model: HfModel, native: bool) -> Decoder:
    """Take over the weights of a tree; they are gone from it. native: the C kernels have started.

    Raises Unread, before anything has changed, where the tree is not a native decoder.
    """
    problem: Unread | None = None
    try:
        if model.ranks.by_expert and any(map(is_experts, model.tree.body.modules())):
            raise Unread("its experts are on different ranks")
        with model.ranks.alone():
            skeleton = read_skeleton(model)
            readings = _read_kinds(model, skeleton)
            config = _config_of(model, skeleton, readings)
    except Unread as error:
        problem = error
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        # reading follows another's code: what it trips over is not a plain layer
        problem = Unread(f"{type(error).__name__}: {error}")
        problem.__cause__ = error
    if not model.ranks.agree(problem is None):
        raise problem or Unread("another rank cannot read its part")
    layers = []
    paths = {module: name for name, module in model.tree.body.named_modules()}
    for number, layer in enumerate(skeleton.layers):
        own = LayerSites(model.sites, f"{model.sites_prefix}{paths[layer]}.")
        layers.append(
            _native_layer(layer, readings[number], config, config.layers[number], native, own)
        )
        trim_heap()
    embedding: Any = model.tree.embedding
    head = packed([skeleton.head], native)
    table = embedding.weight.detach()
    if skeleton.is_tied and isinstance(head.weight, NativeWeight | NativeCodes):
        table = head.weight
    return Decoder(
        facts=model.facts,
        config=config,
        embedding=table,
        dtype=model.dtype,
        layers=layers,
        norm=skeleton.norm.weight,
        head=head,
        rotaries=skeleton.rotaries,
        program=build_program(config, layers, skeleton.norm.weight, model.dtype, model.ranks),
        sites=model.sites,
        ranks=model.ranks,
    )


def _read_kinds(model: HfModel, skeleton: Skeleton) -> list[Reading]:
    """The reading of each layer; one layer of each kind is read and proved."""
    by_kind: dict[Hashable, Reading] = {}
    readings = []
    for number, layer in enumerate(skeleton.layers):
        kind = _kind_of(layer, skeleton.calls[number])
        if kind not in by_kind:
            try:
                by_kind[kind] = _proved(model, skeleton, number)
            except Unread as error:
                raise Unread(f"layer {number}: {error}") from None
        readings.append(by_kind[kind])
    return readings


def _kind_of(layer: torch.nn.Module, call: LayerCall) -> Hashable:
    """A key that is equal for layers that differ only in their weights."""
    parts = []
    for name, module in layer.named_modules():
        numbers = tuple(
            (key, identity(value))
            for key, value in sorted(vars(module).items())
            if key != "layer_idx"
            and not key.startswith(_OWN)
            and (value is None or _is_plain(value))
        )
        shapes = tuple((key, p.shape) for key, p in module.named_parameters(recurse=False))
        port = getattr(module, PORT, None)
        seen: Hashable = type(port).__name__
        if isinstance(port, Port):
            seen = (port.window, port.softcap, port.has_sinks)
        parts.append((name, type(module), numbers, shapes, seen))
    return tuple(parts), tuple(each if _is_plain(each) else id(each) for each in call.given)


def identity(value: object) -> Hashable:
    """Equal for attributes that are alike; a layer may bind arguments to a function anew."""
    if isinstance(value, partial) and all(
        each is None or isinstance(each, int | float | str)
        for each in (*value.args, *value.keywords.values())
    ):
        return id(value.func), repr((value.args, value.keywords))
    return id(value) if callable(value) else value


def _is_plain(value: object) -> bool:
    """Return whether an attribute distinguishes kinds: a number, a name, or a function."""
    return isinstance(value, int | float | str) or callable(value)


def _proved(model: HfModel, skeleton: Skeleton, number: int) -> Reading:
    layer = _in_float32(model, skeleton.layers[number])
    run = model.tree.run
    device = model.device
    step = first_step(device)
    hidden = random_rows(1, len(skeleton.positions), model.facts.hidden_size, device=device)
    kept = model.keeps[number]
    store = make_store([kept], 3, FIRST_PAGE, 1, torch.float32, device)
    store.clear_blocks(torch.arange(3, device=device))
    layers = [store.layers[0]] * len(model.keeps)
    everywhere = KvStore([kept], layers, None, 3, FIRST_PAGE, grouping=one_group(model.keeps))
    run.begin(step, everywhere)
    try:
        reading = read_layer(
            layer, skeleton.calls[number], hidden, skeleton.positions, skeleton.rotaries
        )
    finally:
        run.end()
    if reading.experts is not None:
        experts = in_dtype(reading.experts, skeleton.layers[number])
        reading = dataclasses.replace(reading, experts=experts)
    config = _config_of(model, skeleton, [reading])
    unused = LayerSites(AdapterSites(), "")
    ours = _native_layer(layer, reading, config, config.layers[0], False, unused)
    lengths = skeleton.positions + 1
    turns = [rotary.turns(skeleton.positions, lengths) for rotary in skeleton.rotaries]
    total = hidden[0].clone()
    pages = store.pages_of(0)
    last = ours.forward(total, None, TurnedStep(step, turns, None), pages, config)
    total.add_(last, alpha=config.residual_multiplier)
    error = float((total - reading.output[0]).norm() / reading.output.norm())
    if not error <= TOLERANCE:
        raise Unread(f"as a native layer it is {error:.1e} away from itself")
    return reading


def _in_float32(model: HfModel, layer: torch.nn.Module) -> Any:
    """A copy that shares what belongs to the tree; its weights are copied once."""
    shared: dict[int, Any] = {id(each): each for each in (model.tree.run, model.tree.model.config)}
    for each in layer.parameters():
        own = each.detach().to(torch.float32, copy=True)  # a native layer reorders rows in place
        shared[id(each)] = torch.nn.Parameter(own, requires_grad=False)
    copied = copy.deepcopy(layer, shared).float()
    settle(copied)
    return copied


def _config_of(model: HfModel, skeleton: Skeleton, readings: Sequence[Reading]) -> DecoderConfig:
    """Raises Unread where layers differ in what a decoder has once."""
    configs = {_without_layers(model, skeleton, reading) for reading in readings}
    if len(configs) != 1:
        raise Unread("its layers differ in more than window, rope and MLP")
    layers = tuple(
        LayerConfig(
            each.heads.window,
            each.heads.rope,
            None if each.experts is None else each.experts.routing,
        )
        for each in readings
    )
    dense = [each for each in readings if each.experts is None]
    return dataclasses.replace(
        configs.pop(),
        layers=layers,
        intermediate_size=max((each.intermediate_size for each in dense), default=0),
        mlp_bias=any(each.mlp_bias for each in dense),
        activation=dense[0].activation if dense else "silu",
    )


def _without_layers(model: HfModel, skeleton: Skeleton, reading: Reading) -> DecoderConfig:
    heads = reading.heads
    return DecoderConfig(
        vocab_size=model.facts.vocab_size,
        hidden_size=model.facts.hidden_size,
        intermediate_size=0,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        rms_norm_eps=reading.eps,
        layers=(),
        ropes=tuple(rotary.config for rotary in skeleton.rotaries),
        max_position=model.facts.max_position,
        tied_embeddings=skeleton.is_tied,
        qkv_bias=reading.qkv_bias,
        out_bias=reading.out_bias,
        qk_norm=heads.qk_norm,
        norms_after_rope=heads.norms_after_rope,
        attention_scale=heads.scale,
        attention_softcap=heads.softcap,
        embedding_multiplier=skeleton.embedding_multiplier,
        multiplies_patches=skeleton.multiplies_patches,
        residual_multiplier=reading.residual_multiplier,
        logits_divisor=skeleton.logits_divisor,
        logits_softcap=skeleton.logits_softcap,
    )


def _by_head(weights: list[torch.Tensor], heads: Heads) -> torch.Tensor:
    """Norm weights of queries and of keys, for one head or for all of them, -> [H + K, D]."""
    parts = zip(weights, (heads.num_heads, heads.num_kv_heads), strict=True)
    return torch.cat([weight.view(-1, heads.head_dim).expand(n, -1) for weight, n in parts])


def _native_layer(
    layer: torch.nn.Module,
    reading: Reading,
    config: DecoderConfig,
    layer_config: LayerConfig,
    native: bool,
    sites: LayerSites,
) -> DecoderLayer:
    """Take over the weights of a layer."""
    heads = reading.heads

    def norm(name: str | None) -> torch.Tensor | None:
        found = None if name is None else norm_of(layer.get_submodule(name))
        return None if found is None else found.weight

    def pairs(rows: torch.Tensor) -> torch.Tensor:
        if heads.rope is None or heads.is_interleaved:
            return rows
        return interleave_rows(rows, heads.head_dim, config.ropes[heads.rope].rotary_dim)

    rotated = (heads.num_heads + heads.num_kv_heads) * heads.head_dim
    order = torch.arange(rotated + heads.num_kv_heads * heads.head_dim)
    order[:rotated] = pairs(order[:rotated])
    qk_norm = None
    if heads.norms:
        qk_norm = _by_head([pairs(norm(name)) for name in heads.norms], heads)  # type: ignore[arg-type]
    turned = None
    if heads.rope is not None and not heads.is_interleaved:
        turned = TurnedRows(rotated, heads.head_dim, config.ropes[heads.rope].rotary_dim)
    projections: Any = [layer.get_submodule(name) for name in heads.qkv]
    qkv = sites.add(layer, heads.qkv, packed(projections, native, order), turned)
    return DecoderLayer(
        attention=Attention(
            config=config,
            layer=layer_config,
            qkv=qkv,
            out=linear_of(layer, (reading.out,), native, sites),
            qk_norm=qk_norm,
            sinks=None if reading.sinks is None else layer.get_parameter(reading.sinks).float(),
        ),
        mlp=native_mlp(layer, reading, native, sites),
        attention_norm=norm(reading.attention_norm),
        attention_post_norm=norm(reading.attention_post_norm),
        mlp_norm=norm(reading.mlp_norm),
        mlp_post_norm=norm(reading.mlp_post_norm),
    )

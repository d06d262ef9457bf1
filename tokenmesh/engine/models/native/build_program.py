"""A decoder's layers as a program of C kernels."""

from collections.abc import Sequence
from enum import IntEnum
from typing import Final

import torch

from tokenmesh.engine.layers.mlp import Activation, Experts, Mlp
from tokenmesh.engine.models.keeps import Grouping
from tokenmesh.engine.models.native.attention import Attention
from tokenmesh.engine.models.native.config import (
    DecoderConfig,
    LayerConfig,
)
from tokenmesh.engine.models.native.decoder import DecoderLayer
from tokenmesh.engine.ranks.ranks import ALONE, Ranks
from tokenmesh.kernels.linear import Linear, Weight
from tokenmesh.kernels.moe import routed
from tokenmesh.kernels.native import (
    MAX_HEAD_DIM,
    MAX_QUERIES,
    AnyExperts,
    Kind,
    NativeCodes,
    NativeWeight,
    Op,
    Program,
    ProgramModel,
    Routed,
    Sums,
)

_ACTIVATIONS: Final[dict[Activation, Kind]] = {
    "silu": Kind.SILU_MUL,
    "gelu": Kind.GELU_MUL,
    "gelu_tanh": Kind.GELU_TANH_MUL,
}


class _Buffer(IntEnum):
    HIDDEN = 0
    NORMED = 1
    QKV = 2
    MIXED = 3
    """The attention's result by head."""
    BLOCK = 4
    """It holds what an attention or MLP block adds to HIDDEN."""


def build_program(
    config: DecoderConfig,
    layers: Sequence[DecoderLayer],
    norm: torch.Tensor | None,
    dtype: torch.dtype,
    ranks: Ranks = ALONE,
) -> Program | None:
    """Everything of `Decoder.forward`, the final norm included.

    None when a layer is not packed for the C kernels or has a shape that they do not take.
    """
    if not fits_program(config, layers):
        return None
    writer = ProgramWriter(config, config.grouping)
    starts = []
    for number, (layer, layer_config) in enumerate(zip(layers, config.layers, strict=True)):
        starts.append(len(writer.ops))
        writer.attention_block(number, layer, layer_config)
        writer.mlp_block(layer)
    if norm is not None:
        writer.final_norm(norm)
    return writer.program(dtype, starts, ranks)


def fits_program(config: DecoderConfig, layers: Sequence[DecoderLayer]) -> bool:
    """Return whether the C kernels take the packed weights and the shape of all layers."""
    linears = [
        linear
        for layer in layers
        for linear in (layer.attention.qkv, layer.attention.out, *_linears(layer.mlp))
    ]
    return (
        all(isinstance(linear.weight, NativeWeight | NativeCodes) for linear in linears)
        and all(
            isinstance(layer.mlp.router.weight, NativeWeight)
            for layer in layers
            if isinstance(layer.mlp, Experts)
        )
        and all(
            isinstance(layer.mlp.w13, AnyExperts) and isinstance(layer.mlp.w2, AnyExperts)
            for layer in layers
            if isinstance(layer.mlp, Experts)
        )
        and config.head_dim % 16 == 0
        and config.head_dim <= MAX_HEAD_DIM
        and config.num_heads // config.num_kv_heads <= MAX_QUERIES
    )


def _linears(mlp: Mlp | Experts) -> list[Linear]:
    if isinstance(mlp, Mlp):
        return [mlp.gate_up, mlp.down]
    gate = [] if mlp.shared_gate is None else [mlp.shared_gate]
    return [mlp.router, *gate, *([] if mlp.shared is None else _linears(mlp.shared))]


def _native(weight: Weight) -> NativeWeight | NativeCodes:
    assert isinstance(weight, NativeWeight | NativeCodes)
    return weight


class ProgramWriter:
    """Appends operations, in the order of `DecoderLayer.forward`.

    A head reads states of twice the hidden size, see `join`; its own are the second half of them.
    """

    def __init__(self, config: DecoderConfig, grouping: Grouping) -> None:
        self._config = config
        self._grouping = grouping
        self._first = 0
        """The first number of HIDDEN that is the state of a layer."""
        self._joined: int | None = None
        """The buffer that the next layer reads in place of its state."""
        self.ops: list[Op] = []
        self.sums: list[int] = []
        """Numbers of operations after which BLOCK is one rank's part of a sum."""
        self.kept: list[object] = []
        self.routed: list[Routed] = []
        self._inner: list[tuple[str, int]] = []

    @property
    def inner_widths(self) -> list[int]:
        """Widths of the buffers after those of _Buffer, for values within MLP or experts."""
        return [width for _, width in self._inner]

    def program(
        self, dtype: torch.dtype, layers: Sequence[int] = (), ranks: Ranks = ALONE
    ) -> Program:
        """All that was appended. layers: see `Program`."""
        config = self._config
        qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        hidden, mixed = config.hidden_size, config.num_heads * config.head_dim
        model = ProgramModel(
            is_bf16=dtype == torch.bfloat16,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        )
        widths = [self._first + hidden, hidden, qkv, mixed, hidden, *self.inner_widths]
        sums = None if ranks.world == 1 else Sums(self.sums, _Buffer.BLOCK, ranks.sum_)
        return Program(model, self.ops, widths, self.kept, self.routed, sums, layers)

    def join(
        self, token_norm: torch.Tensor, state_norm: torch.Tensor, *, adds_normed: bool
    ) -> None:
        """Let the first layer read both halves of HIDDEN, each normalized, and add to the second.

        adds_normed: to the second half as it was normalized."""
        size = self._config.hidden_size
        joined = self._buffer("joined", 2 * size)
        self._norm(_Buffer.HIDDEN, joined, token_norm)
        self._norm(_Buffer.HIDDEN, joined, state_norm, size, size)
        if adds_normed:
            self._norm(_Buffer.HIDDEN, _Buffer.HIDDEN, state_norm, size, size)
        self._first, self._joined = size, joined

    def attention_block(self, number: int, layer: DecoderLayer, config: LayerConfig) -> None:
        """Norm, projections, norms and rope of queries and keys, attention, residual."""
        attention, shape = layer.attention, self._config
        slot, group = self._grouping.slot_of[number], self._grouping.group_of[number]
        queries = shape.num_heads * shape.head_dim
        keys = shape.num_kv_heads * shape.head_dim
        source = self._normed(layer.attention_norm) if self._joined is None else self._joined
        self._joined = None
        self._linear(source, _Buffer.QKV, attention.qkv)
        if not shape.norms_after_rope:
            self._qk_norm(attention, queries, keys)
        if config.rope is not None:
            self._in_place(Kind.ROPE, _Buffer.QKV, queries + keys, index=config.rope)
        if shape.norms_after_rope:
            self._qk_norm(attention, queries, keys)
        if shape.query_scaling is not None:
            self._in_place(Kind.SCALE, _Buffer.QKV, queries)
        self._in_place(
            Kind.KV_WRITE,
            _Buffer.QKV,
            2 * keys,
            offset=queries,
            index=slot,
            group=group,
            layer=number,
        )
        self._op(
            Kind.ATTENTION,
            _Buffer.QKV,
            _Buffer.MIXED,
            index=slot,
            group=group,
            layer=number,
            window=config.window or 0,
            value=shape.attention_scale,
            softcap=shape.attention_softcap or 0.0,
            weight=None if attention.sinks is None else self._keep(attention.sinks),
        )
        self._linear(_Buffer.MIXED, _Buffer.BLOCK, attention.out)
        self.sums.append(len(self.ops))
        self._add(layer.attention_post_norm)

    def mlp_block(self, layer: DecoderLayer) -> None:
        """Norm, gated MLP or experts, residual."""
        source = self._normed(layer.mlp_norm)
        if isinstance(layer.mlp, Experts):
            self._experts(source, layer.mlp)
        else:
            self._mlp(source, layer.mlp, _Buffer.BLOCK)
        self.sums.append(len(self.ops))
        self._add(layer.mlp_post_norm)

    def _mlp(self, source: int, mlp: Mlp, target: int) -> None:
        width = _native(mlp.down.weight).in_features
        gate_up = self._buffer("gate_up", 2 * width)
        self._linear(source, gate_up, mlp.gate_up)
        # what is active takes the place of the gates
        self._op(_ACTIVATIONS[mlp.activation], gate_up, gate_up, width=width)
        self._linear(gate_up, target, mlp.down)

    def _experts(self, source: int, mlp: Experts) -> None:
        assert isinstance(mlp.w13, AnyExperts)
        assert isinstance(mlp.w2, AnyExperts)
        router = mlp.router.weight
        assert isinstance(router, NativeWeight)
        own = routed(router, mlp.correction, mlp.routing, mlp.w13, mlp.w2, mlp.spec)
        self.routed.append(own)
        self._op(Kind.EXPERTS, source, _Buffer.BLOCK, weight=own.address)
        if mlp.shared is None:
            return
        width = self._config.hidden_size
        shared = self._buffer("shared", width)
        self._mlp(source, mlp.shared, shared)
        if mlp.shared_gate is not None:
            gate = self._buffer("gate", 1)
            self._linear(source, gate, mlp.shared_gate)
            self._op(Kind.TOKEN_GATE, gate, shared, width=width)
        self._op(Kind.ADD, shared, _Buffer.BLOCK, width=width, value=1.0)

    def _buffer(self, *key: *tuple[str, int]) -> int:
        """The buffer of this use and width, shared by all layers."""
        if key not in self._inner:
            self._inner.append(key)
        return len(_Buffer) + self._inner.index(key)

    def final_norm(self, weight: torch.Tensor) -> None:
        """Add what the model returns of each token."""
        self._norm(_Buffer.HIDDEN, _Buffer.HIDDEN, weight)

    def _normed(self, weight: torch.Tensor | None) -> _Buffer:
        if weight is None:
            assert not self._first, "a matrix reads a buffer from its start"
            return _Buffer.HIDDEN
        self._norm(_Buffer.HIDDEN, _Buffer.NORMED, weight, self._first)
        return _Buffer.NORMED

    def _add(self, post_norm: torch.Tensor | None) -> None:
        if post_norm is not None:
            self._norm(_Buffer.BLOCK, _Buffer.BLOCK, post_norm)
        width, factor = self._config.hidden_size, self._config.residual_multiplier
        self._op(
            Kind.ADD,
            _Buffer.BLOCK,
            _Buffer.HIDDEN,
            width=width,
            value=factor,
            target_offset=self._first,
        )

    def _qk_norm(self, attention: Attention, queries: int, keys: int) -> None:
        weight, eps = attention.qk_norm, self._config.rms_norm_eps
        if weight is None:
            return
        if self._config.qk_norm == "head":
            self._in_place(
                Kind.HEAD_NORM, _Buffer.QKV, queries + keys, value=eps, weight=self._keep(weight)
            )
            return
        flat = weight.flatten()
        self._norm(_Buffer.QKV, _Buffer.QKV, flat[:queries])
        self._norm(_Buffer.QKV, _Buffer.QKV, flat[queries:], queries, queries)

    def _norm(
        self, source: int, target: int, weight: torch.Tensor, offset: int = 0, to: int = 0
    ) -> None:
        self._op(
            Kind.NORM,
            source,
            target,
            width=weight.numel(),
            offset=offset,
            target_offset=to,
            value=self._config.rms_norm_eps,
            weight=self._keep(weight),
        )

    def _linear(self, source: int, target: int, linear: Linear) -> None:
        native = _native(linear.weight)
        if isinstance(native, NativeCodes):
            self.kept.append(native)
            self._op(
                Kind.QUANTIZED, source, target, width=native.in_features, weight=native.address
            )
        else:
            self._op(
                Kind.LINEAR,
                source,
                target,
                width=native.in_features,
                outputs=native.out_features,
                weight=self._keep(native.panels),
                bias=None if native.bias is None else self._keep(native.bias),
            )
        if linear.adapters is not None:
            number = linear.adapters.number
            self._op(Kind.LORA, source, target, width=native.in_features, index=number)

    def _in_place(self, kind: Kind, buffer: _Buffer, width: int, **fields: object) -> None:
        self._op(kind, buffer, buffer, width=width, **fields)

    def _op(self, kind: Kind, source: int, target: int, **fields: object) -> None:
        self.ops.append(Op(kind=kind, source=source, target=target, **fields))

    def _keep(self, weight: torch.Tensor) -> int:
        """The address of a weight that the program is to keep alive."""
        weight = weight.contiguous()
        self.kept.append(weight)
        return weight.data_ptr()

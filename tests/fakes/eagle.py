"""Tiny heads of EAGLE and EAGLE-3 with values that are not neutral, and what they draft."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import torch
from safetensors.torch import save_file

Weights = dict[str, torch.Tensor]

HEADS: Final = 4
KV_HEADS: Final = 2
WIDTH: Final = 16
INNER: Final = 80


@dataclass(frozen=True, slots=True)
class TinyHead:
    """A head on disk, and its math in plain torch."""

    directory: Path
    kind: Literal["eagle", "eagle3"]
    config: dict[str, Any]
    weights: Weights
    layer: str
    """The prefix of its first layer."""
    taps: tuple[int, ...]

    def chain(
        self, token_ids: list[int], hidden: list[torch.Tensor], target: Any, count: int
    ) -> list[int]:
        """The tokens that it drafts greedily behind others. hidden: of the model, the input of each
        layer [T, H] and, last, the final states; target: the model."""
        table = self.weights.get("embed_tokens.weight", target.get_input_embeddings().weight)
        length = len(token_ids) - 1
        if self.kind == "eagle3":
            states = torch.cat([hidden[tap][:length] for tap in self.taps], dim=-1)
            states = states @ self.weights["fc.weight"].T
        else:
            states = hidden[-1][:length]
            table = target.get_input_embeddings().weight
        tokens, drafts = token_ids[1:], list[int]()
        for _ in range(count):
            out = self._layer(table[torch.tensor(tokens)], states)
            drafts.append(int(self._logits(out[-1], target).argmax()))
            tokens = [*tokens, drafts[-1]]
            states = torch.cat([states, out[-1:]])
        return drafts

    def _logits(self, state: torch.Tensor, target: Any) -> torch.Tensor:
        if self.kind == "eagle":
            return target.get_output_embeddings()(state)  # type: ignore[no-any-return]
        state = self._norm(state, "norm.weight")
        logits = state @ self.weights["lm_head.weight"].T
        whole = torch.full((self.config["vocab_size"],), -torch.inf)
        offsets = self.weights.get("d2t", torch.zeros(len(logits), dtype=torch.int64))
        whole[torch.arange(len(logits)) + offsets] = logits
        return whole

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * self.weights[name]

    def _of(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.weights[f"{self.layer}{name}.weight"].T

    def _layer(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        if self.kind == "eagle3":
            normed = self._norm(states, f"{self.layer}hidden_norm.weight")
            first = self._norm(tokens, f"{self.layer}input_layernorm.weight")
            x = torch.cat([first, normed], dim=-1)
            base = normed if self.config.get("norm_before_residual") else states
        else:
            both = torch.cat([tokens, states], dim=-1)
            x = base = both @ self.weights["fc.weight"].T + self.weights["fc.bias"]
        base = base + self._attention(x)
        x = self._norm(base, f"{self.layer}post_attention_layernorm.weight")
        gate = torch.nn.functional.silu(self._of(x, "mlp.gate_proj"))
        return base + self._of(gate * self._of(x, "mlp.up_proj"), "mlp.down_proj")

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        heads, kv_heads = (self.config[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
        width = self.config["head_dim"]
        powers = torch.arange(width // 2) / (width // 2)
        angles = torch.arange(len(x))[:, None] * self.config["rope_theta"] ** -powers

        def turned(part: torch.Tensor, count: int) -> torch.Tensor:
            first, second = part.view(len(x), count, 2, width // 2).unbind(2)
            cos, sin = angles.cos()[:, None], angles.sin()[:, None]
            return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

        query = turned(self._of(x, "self_attn.q_proj"), heads)
        key = turned(self._of(x, "self_attn.k_proj"), kv_heads)
        value = self._of(x, "self_attn.v_proj").view(len(x), kv_heads, width)
        key, value = (each.repeat_interleave(heads // kv_heads, 1) for each in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) / width**0.5
        later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", weights, value).flatten(1)
        return self._of(mixed, "self_attn.o_proj")


@dataclass(frozen=True, slots=True)
class HeadSizes:
    hidden: int
    target: int
    vocab: int
    drafted: int | None
    num_taps: int
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(11))

    def matrix(self, outputs: int, inputs: int) -> torch.Tensor:
        drawn: torch.Tensor = torch.randn(outputs, inputs, generator=self.generator)
        return drawn * (1.3 / math.sqrt(inputs))

    def norm(self) -> torch.Tensor:
        return 0.5 + torch.rand(self.hidden, generator=self.generator)


def _weights(sizes: HeadSizes, layer: str, *, is_third: bool) -> Weights:
    hidden, matrix = sizes.hidden, sizes.matrix
    attended = 2 * hidden if is_third else hidden
    read = sizes.num_taps * sizes.target if is_third else hidden + sizes.target
    weights = {
        "fc.weight": matrix(hidden, read),
        f"{layer}self_attn.q_proj.weight": matrix(HEADS * WIDTH, attended),
        f"{layer}self_attn.k_proj.weight": matrix(KV_HEADS * WIDTH, attended),
        f"{layer}self_attn.v_proj.weight": matrix(KV_HEADS * WIDTH, attended),
        f"{layer}self_attn.o_proj.weight": matrix(hidden, HEADS * WIDTH),
        f"{layer}mlp.gate_proj.weight": matrix(INNER, hidden),
        f"{layer}mlp.up_proj.weight": matrix(INNER, hidden),
        f"{layer}mlp.down_proj.weight": matrix(hidden, INNER),
        f"{layer}post_attention_layernorm.weight": sizes.norm(),
    }
    if not is_third:
        return weights | {"fc.bias": sizes.norm()}
    weights |= {
        f"{layer}input_layernorm.weight": sizes.norm(),
        f"{layer}hidden_norm.weight": sizes.norm(),
        "norm.weight": sizes.norm(),
        "lm_head.weight": matrix(sizes.drafted or sizes.vocab, hidden),
    }
    if sizes.drafted is not None:
        chosen = torch.randperm(sizes.vocab, generator=sizes.generator)[: sizes.drafted]
        ids = chosen.sort().values
        weights["d2t"] = ids - torch.arange(sizes.drafted)
        weights["t2d"] = torch.zeros(sizes.vocab, dtype=torch.bool).index_fill(0, ids, True)
    return weights


def make_head(
    directory: Path,
    kind: Literal["eagle", "eagle3"],
    *,
    hidden_size: int = 64,
    target_hidden_size: int = 64,
    vocab_size: int = 160,
    drafted: int | None = None,
    taps: tuple[int, ...] = (0, 1, 2),
    layer: str = "midlayer.",
    prefix: str = "",
    with_embedding: bool = False,
    **config: Any,
) -> TinyHead:
    """drafted: so many tokens have logits, named by d2t; None: all. config: further keys."""
    is_third = kind == "eagle3"
    layer = layer if is_third else "layers.0."
    sizes = HeadSizes(hidden_size, target_hidden_size, vocab_size, drafted, len(taps))
    weights = _weights(sizes, layer, is_third=is_third)
    if with_embedding:
        weights["embed_tokens.weight"] = sizes.matrix(vocab_size, hidden_size)
    values = {
        "architectures": ["LlamaForCausalLMEagle3" if is_third else "LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": WIDTH,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "max_position_embeddings": 256,
        "hidden_act": "silu",
        "vocab_size": vocab_size,
        **({"draft_vocab_size": drafted} if drafted is not None else {}),
        **({"eagle_aux_hidden_state_layer_ids": list(taps)} if is_third else {}),
        **config,
    }
    directory.mkdir(parents=True)
    stored = {
        f"{'' if name in ('lm_head.weight', 'd2t', 't2d') else prefix}{name}": each.contiguous()
        for name, each in weights.items()
    }
    save_file(stored, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(values))
    return TinyHead(directory, kind, values, weights, layer, taps)

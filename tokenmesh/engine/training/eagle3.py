"""TrainedHead: a head of EAGLE-3 as a module of torch, for training.

It learns from the states of the model at first and then from its own, as it will draft: step j
reads what step j - 1 made of the position before. Shapes: B sequences, T positions, H hidden size,
D tokens that it can draft.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """Those of the model but for the number of tokens."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    num_taps: int
    num_tokens: int


class TrainedNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)
        return (normed * self.weight).to(x.dtype)


class TrainedHead(nn.Module):
    """The names of its parameters are those of a checkpoint."""

    def __init__(self, sizes: HeadSizes) -> None:
        super().__init__()
        self.sizes = sizes
        hidden, inner, eps = sizes.hidden_size, sizes.intermediate_size, sizes.rms_norm_eps
        queries, keys = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
        self.fc = _linear(sizes.num_taps * hidden, hidden)
        self.midlayer: Any = nn.ModuleDict(
            {
                "input_layernorm": TrainedNorm(hidden, eps),
                "hidden_norm": TrainedNorm(hidden, eps),
                "post_attention_layernorm": TrainedNorm(hidden, eps),
                "self_attn": nn.ModuleDict(
                    {
                        "q_proj": _linear(2 * hidden, queries),
                        "k_proj": _linear(2 * hidden, keys),
                        "v_proj": _linear(2 * hidden, keys),
                        "o_proj": _linear(queries, hidden),
                    }
                ),
                "mlp": nn.ModuleDict(
                    {
                        "gate_proj": _linear(hidden, inner),
                        "up_proj": _linear(hidden, inner),
                        "down_proj": _linear(inner, hidden),
                    }
                ),
            }
        )
        self.norm = TrainedNorm(hidden, eps)
        self.lm_head = _linear(hidden, sizes.num_tokens)

    def begin_as(self, layer: Mapping[str, torch.Tensor], norm: torch.Tensor) -> None:
        """Start from a layer of the model, by the names of its tensors, and its final norm: it
        reads the state nearest to the model's end, and nothing of the token yet."""
        own = dict(self.midlayer.named_parameters())
        hidden = self.sizes.hidden_size
        with torch.no_grad():
            for name, value in layer.items():
                if name == "input_layernorm.weight":
                    own["hidden_norm.weight"].copy_(value)
                elif name.split(".")[-2] in ("q_proj", "k_proj", "v_proj"):
                    own[name][:, hidden:].copy_(value)
                    own[name][:, :hidden].mul_(0.3)
                elif name in own:
                    own[name].copy_(value)
            # the model's own would be sure of the next token, which is known here
            self.norm.weight.copy_(norm).mul_(0.4)
            self.fc.weight.mul_(0.1)
            self.fc.weight[:, -hidden:] += torch.eye(hidden)

    def losses(
        self, tokens: torch.Tensor, taps: torch.Tensor, wanted: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the loss of each step [B, T]: the cross entropy of what it guesses at each
        position.

        tokens [B, T, H] are embeddings of the token after each position, taps [B, T, taps * H] the
        model's states there, wanted the probabilities [B, T, D] of the token two behind, the same
        for every step. A step's first positions have nothing to read, and lose nothing.
        """
        states, found = self.fc(taps), []
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for step, probabilities in enumerate(wanted):
            if step:
                # each position reads what the one before it made
                states = functional.pad(states, (0, 0, 1, 0))[:, :-1]
            states = self._layer(tokens, states, keys, values)
            logits = self.lm_head(self.norm(states)).float()
            loss = -(probabilities * logits.log_softmax(-1)).sum(-1)
            loss = torch.cat([torch.zeros_like(loss[:, :step]), loss[:, step:]], dim=1)
            found.append(loss)
        return found

    def guesses(self, tokens: torch.Tensor, taps: torch.Tensor, steps: int) -> list[torch.Tensor]:
        """Logits [B, T, D] of each step."""
        states, found = self.fc(taps), []
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for step in range(steps):
            if step:
                states = functional.pad(states, (0, 0, 1, 0))[:, :-1]
            states = self._layer(tokens, states, keys, values)
            found.append(self.lm_head(self.norm(states)).float())
        return found

    def _layer(
        self,
        tokens: torch.Tensor,
        states: torch.Tensor,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
    ) -> torch.Tensor:
        layer = self.midlayer
        x = torch.cat([layer["input_layernorm"](tokens), layer["hidden_norm"](states)], dim=-1)
        states = states + self._attention(x, keys, values)
        x = layer["post_attention_layernorm"](states)
        mlp = layer["mlp"]
        gated = functional.silu(mlp["gate_proj"](x)) * mlp["up_proj"](x)
        more: torch.Tensor = mlp["down_proj"](gated)
        return states + more

    def _attention(
        self, x: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]
    ) -> torch.Tensor:
        """Appends the keys and values of this step. A position of step j sees those of step 0 up to
        j positions before it, and one of each step after that: what a chain of drafts sees."""
        sizes, attention = self.sizes, self.midlayer["self_attn"]
        shape = (*x.shape[:2], -1, sizes.head_dim)
        groups = sizes.num_heads // sizes.num_kv_heads
        query = self._turned(attention["q_proj"](x).view(shape))
        keys.append(self._turned(attention["k_proj"](x).view(shape)).repeat_interleave(groups, 1))
        value = attention["v_proj"](x).view(shape).transpose(1, 2)
        values.append(value.repeat_interleave(groups, 1))
        step, length = len(keys) - 1, x.shape[1]
        scores = query @ keys[0].transpose(2, 3) / math.sqrt(sizes.head_dim)
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1 - step)
        scores = scores.masked_fill(hidden, -1e9)
        chain = []
        for each in range(1, step + 1):
            back = step - each
            key = functional.pad(keys[each], (0, 0, back, 0))[:, :, :length]
            chain.append((query * key).sum(-1, keepdim=True) / math.sqrt(sizes.head_dim))
        weights = torch.cat([scores, *chain], dim=-1).float().softmax(-1).to(query.dtype)
        mixed = weights[..., :length] @ values[0]
        for each in range(1, step + 1):
            back = step - each
            value = functional.pad(values[each], (0, 0, back, 0))[:, :, :length]
            mixed = mixed + weights[..., length + each - 1 : length + each] * value
        out: torch.Tensor = attention["o_proj"](mixed.transpose(1, 2).flatten(2))
        return out

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, heads, features] -> [B, heads, T, features], turned by position."""
        half = self.sizes.head_dim // 2
        powers = torch.arange(half) / half
        angles = torch.arange(x.shape[1])[:, None] * self.sizes.rope_theta**-powers
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        x = x.transpose(1, 2)
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    made = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(made.weight, std=0.5 / math.sqrt(inputs))
    return made

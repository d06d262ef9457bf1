"""A head start: heads that can copy, and digits that know their order, before training begins.

Copying (a name into JSON, digits into an equation) needs two heads in a row: one that brings each
token the token before it, and one that looks for an earlier place where that was the present
token (an induction head). Found by gradient descent alone they take most of an hour on a CPU;
written into the initial weights they are refined from the first step on. Digits begin as points
on circles (Fourier features), on which adding is turning.
"""

from __future__ import annotations

import math

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

_CONSTANT = 4.0  # the first number of every embedding; the others are normally distributed
_PREVIOUS_SHARPNESS = 6.0
_MATCH_SHARPNESS = 2.0
_LANDING = 4.0  # how loud the previous token is next to the present one
_COPY_STRENGTH = 6
_LOGIT = 0.06


def _orthonormal(rows: int, columns: int) -> torch.Tensor:
    """Random orthonormal rows that do not read the constant first column."""
    matrix = torch.linalg.qr(torch.randn(columns - 1, rows))[0].T
    return torch.cat([torch.zeros(rows, 1), matrix], dim=1)


def _rotate(vector: torch.Tensor, frequencies: torch.Tensor, position: int) -> torch.Tensor:
    """`vector` (one head's query or key) as rotary embeddings turn it at `position`."""
    cos, sin = torch.cos(frequencies * position), torch.sin(frequencies * position)
    first, second = vector.chunk(2)
    return torch.cat([first * cos - second * sin, second * cos + first * sin])


def _digit_features() -> torch.Tensor:
    """[10, 11]: where each digit lies on circles of five frequencies, and on a line."""
    digits = torch.arange(10.0)
    angles = [2 * math.pi * turns * digits / 10 for turns in range(1, 6)]
    circles = [math.sqrt(2) * wave(angle) for angle in angles for wave in (torch.cos, torch.sin)]
    return torch.stack([*circles, (digits - 4.5) / 2.87], dim=1)


@torch.no_grad()
def give_head_start(network: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    """Write previous-token heads into layer 0 and induction heads into layer 1.

    One of each for every key-value head, at its first query head. The other heads stay random, but
    like the MLPs they begin silent.
    """
    config, model = network.config, network.model
    width, size, copies = config.hidden_size, config.head_dim, config.num_key_value_heads
    group, half = config.num_attention_heads // copies, size // 2
    for layer in model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    embeddings = model.embed_tokens.weight.normal_()
    embeddings[:, 0] = _CONSTANT
    digits = [tokenizer.token_to_id(str(digit)) for digit in range(10)]
    features = _digit_features()
    embeddings[digits, 1 : 1 + features.shape[1]] = features
    network.lm_head.weight.zero_()
    network.lm_head.weight[digits, 1 : 1 + features.shape[1]] = features * _LOGIT * 2
    frequencies = model.rotary_emb.inv_freq
    before, match = model.layers[0].self_attn, model.layers[1].self_attn
    # The slowly turning half of the rotary pairs compares tokens at any distance.
    slow = torch.cat([torch.arange(half // 2, half), torch.arange(half + half // 2, size)])
    steady = torch.zeros(size)
    steady[: half // 2] = _PREVIOUS_SHARPNESS / _CONSTANT
    rank = size * 3 // 4
    places = torch.split(
        _orthonormal(copies * (2 * half + rank), width), [half, half, rank] * copies
    )
    for number in range(copies):
        kv, q = number * size, number * group * size
        carried, landing, spoken = places[3 * number : 3 * number + 3]
        copied = _orthonormal(rank, width)
        before.q_proj.weight[q : q + size] = 0
        before.k_proj.weight[kv : kv + size] = 0
        before.q_proj.weight[q : q + size, 0] = steady
        before.k_proj.weight[kv : kv + size, 0] = _rotate(steady, frequencies, 1)
        before.v_proj.weight[kv : kv + half] = carried
        before.o_proj.weight[:, q : q + half] = landing.T * _LANDING
        match.q_proj.weight[q : q + size] = 0
        match.k_proj.weight[kv : kv + size] = 0
        match.q_proj.weight[q + slow] = carried * _MATCH_SHARPNESS
        match.k_proj.weight[kv + slow] = landing * _MATCH_SHARPNESS
        match.v_proj.weight[kv : kv + rank] = copied
        match.o_proj.weight[:, q : q + rank] = spoken.T * _COPY_STRENGTH
        network.lm_head.weight += embeddings @ copied.T @ spoken * _LOGIT

"""The network: a Llama of a few million parameters, and its forward pass for training."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import AttentionInterface, GenerationConfig, LlamaConfig, LlamaForCausalLM

from scripts.demo_model.packing import Batch
from scripts.demo_model.tokenizer import (
    CONTEXT_LENGTH,
    END_OF_TEXT,
    END_OF_TURN,
    VOCABULARY_SIZE,
)

TRAINING_ATTENTION = "matmul_causal"


def _matmul_causal(
    module: torch.nn.Module,
    query: torch.Tensor,  # [rows, heads, length, head size]
    key: torch.Tensor,  # [rows, kv heads, length, head size]
    value: torch.Tensor,
    attention_mask: None,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention as plain matmuls: on a CPU three times as fast as sdpa for short rows."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    hidden = torch.full((query.shape[2], query.shape[2]), -torch.inf, device=query.device).triu(1)
    scores = query @ key.transpose(-1, -2) * scaling + hidden.to(query.dtype)
    return (scores.softmax(-1) @ value).transpose(1, 2), None


AttentionInterface.register(TRAINING_ATTENTION, _matmul_causal)


def build_network(tokenizer: Tokenizer) -> LlamaForCausalLM:
    """A fresh network that stops at the end of its turn or of a text."""
    end_of_turn = tokenizer.token_to_id(END_OF_TURN)
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=end_of_turn,
        pad_token_id=end_of_text,
        attn_implementation=TRAINING_ATTENTION,
    )
    network = LlamaForCausalLM(config)
    network.generation_config = GenerationConfig(
        eos_token_id=[end_of_turn, end_of_text], pad_token_id=end_of_text, do_sample=False
    )
    return network


def loss_of(network: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    """The summed cross entropy of the learned tokens, in nats.

    Calls the layers itself: transformers takes a jump in the positions for the start of another
    sequence, and hides what came before.
    """
    model = network.model
    with torch.autocast(batch.ids.device.type, dtype=torch.bfloat16):
        hidden = model.embed_tokens(batch.ids)
        rotary = model.rotary_emb(hidden, batch.positions)
        for layer in model.layers:
            hidden = layer(hidden, attention_mask=None, position_embeddings=rotary)
        predicting = batch.learned[:, 1:]
        logits = F.linear(model.norm(hidden)[:, :-1][predicting], network.lm_head.weight)
    return F.cross_entropy(logits.float(), batch.ids[:, 1:][predicting], reduction="sum")

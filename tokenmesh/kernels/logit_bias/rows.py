"""Arguments of `logit_bias` other than the logits."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LimitRows:
    """The tokens that rows may draw. Only rows that need it hold one of the S slots."""

    slot: torch.Tensor
    """int32 [R]: the slot of each state row; -1 for none."""
    has_allowed: torch.Tensor
    """int32 [S]: 1 when only allowed tokens may be drawn."""
    allowed: torch.Tensor
    """int32 [S, ceil(V / 32)]: bit i % 32 of word i // 32 allows token i."""
    num_edits: torch.Tensor
    """int32 [S]"""
    edit_ids: torch.Tensor
    """int32 [S, E]: tokens with a bias and stop tokens, each once, all below V."""
    edit_bias: torch.Tensor
    """float32 [S, E]"""
    edit_is_stop: torch.Tensor
    """int32 [S, E]: 1 for tokens that end the output."""
    min_tokens: torch.Tensor
    """int32 [S]: output positions below it may not stop."""
    num_words: torch.Tensor
    """int32 [S]"""
    word_ends: torch.Tensor
    """int32 [S, W]: where each bad word ends in `word_tokens`; it begins where the last ended."""
    word_tokens: torch.Tensor
    """int32 [S, T]; the last token of each word is below V."""
    recent: torch.Tensor
    """int32 [S, L]: the last L tokens of the output, newest first, -1 before the output began."""

"""Limits: what bounds a step of the engine."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int
    """0: no bound but the budget."""
    block_size: int
    watermark_blocks: int
    """Free blocks that an admission leaves to the running requests."""

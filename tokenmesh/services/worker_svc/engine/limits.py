"""EngineLimits: what bounds a step of the engine."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What bounds a step."""

    num_rows: int
    """Not above `max_num_batched_tokens`: then everybody who decodes has a token of each step."""
    max_num_batched_tokens: int
    long_prefill_token_threshold: int
    """0: no bound but the budget."""
    block_size: int
    watermark_blocks: int
    """Free blocks that an admission leaves to the running requests."""

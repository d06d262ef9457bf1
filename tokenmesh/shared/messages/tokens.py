"""Tokens: the hot path. One message per engine step and gateway, array-like, never one per token.

Fields are positional: append only, never reorder, new ones with a default.
"""

import msgspec

from tokenmesh.engine.api.tokens import Delta, FinishReason, TokenLogprobs
from tokenmesh.shared.ids import WorkerId

__all__ = ["Delta", "FinishReason", "TokenLogprobs", "Tokens"]


class Tokens(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One step's new tokens of all streams of one gateway."""

    worker_id: WorkerId
    epoch: int
    step: int
    deltas: list[Delta]

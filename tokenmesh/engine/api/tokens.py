"""Define what a step adds to a stream.

Fields are positional: append only, new ones with a default.
"""

from typing import Literal

import msgspec

from tokenmesh.shared.failed import Failed

FinishReason = Literal["stop", "length", "repetition", "abort", "error"]


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities at one position."""

    token_id: int
    logprob: float
    rank: int
    """1-based rank of `token_id` in the distribution."""
    top_ids: list[int] = []
    """The most likely, best first; or the requested ones, in their order."""
    top_logprobs: list[float] = []


class Delta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The tokens that one step added to one stream."""

    stream: int
    attempt: int
    offset: int
    """Output position of the first token in `token_ids`; the receiver drops what it has."""
    token_ids: bytes
    finish: FinishReason | None = None
    stop_token: int | None = None
    """The stop token id that ended the stream (not for eos)."""
    logprobs: list[TokenLogprobs] | None = None
    """One for each of `token_ids`, when requested."""
    cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache; on the first delta of an attempt."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One for each prompt token (None for the first); on the first delta, when requested."""
    error: Failed | None = None
    """With finish "error": why."""
    alignment: list[int] | None = None
    """The state of the encoder at which each token of the prompt's transcript ends and the next one
    begins; on the first delta, when requested."""
    drafts: tuple[int, int] | None = None
    """Tokens that were drafted in the attempt so far, and those of them that the stream drew as
    well; None: none were."""

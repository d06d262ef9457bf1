"""Log-probabilities of a prompt come in one message: what cannot fit is refused uncomputed."""

from typing import Final

from tokenmesh.shared.errors import PayloadTooLarge

_ENTRY_BYTES: Final = 14
"""Of a `TokenLogprobs` in msgpack at least: its number, its rank and its lists take a byte each, or
more, a log-probability always nine."""
_TOP_BYTES: Final = 10
"""Of each further token in it, in the same way."""


def check_fits(num_logprobs: int | None, num_tokens: int, max_bytes: int) -> None:
    """`num_logprobs`: of each prompt token; None: none at all. `max_bytes`: of a message.

    What passes may still be too large: then the worker says so. Raises PayloadTooLarge.
    """
    if num_logprobs is None:
        return
    num_bytes = (num_tokens - 1) * (_ENTRY_BYTES + num_logprobs * _TOP_BYTES)
    if num_bytes > max_bytes:
        raise PayloadTooLarge(
            f"prompt_logprobs: {num_logprobs} for each of {num_tokens} prompt tokens are at least "
            f"{num_bytes} bytes, more than the {max_bytes} of a message: ask for fewer, or send a "
            "shorter prompt",
            param="prompt_logprobs",
        )

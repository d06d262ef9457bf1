"""Repetition: whether a stream's last tokens are one pattern, over and over."""

from collections.abc import Sequence

from tokenmesh.engine.api.sampling import RepetitionRule


def ends_in_loop(token_ids: Sequence[int], start: int, rule: RepetitionRule) -> bool:
    """Return whether the tokens from `start` on end with one pattern, `min_count` times in a row.

    Depends on the tokens alone, so the result is the same after a migration.
    """
    longest = min(rule.max_size, (len(token_ids) - start) // rule.min_count)
    last = token_ids[-1]
    for size in range(rule.min_size, longest + 1):
        # one token rules out nearly every pattern
        if token_ids[-1 - size] == last and _repeats(token_ids, size, rule.min_count):
            return True
    return False


def _repeats(token_ids: Sequence[int], size: int, count: int) -> bool:
    end = len(token_ids)
    pattern = token_ids[end - size :]
    return all(token_ids[end - (k + 1) * size : end - k * size] == pattern for k in range(1, count))

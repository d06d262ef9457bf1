"""The measured speed of steps."""

from typing import Final

_KEPT_TOKENS: Final = 4096.0
"""Prefill tokens over which the rate forgets."""

_KEPT_STEPS: Final = 32.0
"""Decode steps over which the step time forgets."""


class RateMeter:
    """Exponentially forgetting means. Both are 0 before the first measurement."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self._tokens = 0.0
        self._seconds = 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens computed in a second of prefill."""
        return self._tokens / self._seconds if self._seconds > 0 else 0.0

    def expected_s(self, num_prefill: int, num_decode: int) -> float:
        """Return how long such a step takes, as far as that is known."""
        prefill_s = num_prefill * self._seconds / self._tokens if self._tokens > 0 else 0.0
        return prefill_s + (self.step_s if num_decode else 0.0)

    def note(self, duration_s: float, num_prefill: int, num_decode: int) -> None:
        """One step with so many prefill tokens and decoding streams."""
        if num_prefill == 0:
            weight = 1.0 / _KEPT_STEPS if self.step_s else 1.0
            self.step_s += weight * (duration_s - self.step_s)
            return
        # the decoding streams of a mixed step cost what they cost alone, as far as that is known
        share = num_prefill / (num_prefill + num_decode)
        prefill_s = max(duration_s - self.step_s, duration_s * share) if num_decode else duration_s
        keep = max(0.0, 1.0 - num_prefill / _KEPT_TOKENS)
        self._tokens = self._tokens * keep + num_prefill
        self._seconds = self._seconds * keep + prefill_s

"""StepClock: what decoding requests count their computed tokens by."""

from typing import Final


class StepClock:
    """Steps that all decoding requests have taken part in."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0


STILL: Final = StepClock()
"""Of requests that do not decode; nobody moves it."""

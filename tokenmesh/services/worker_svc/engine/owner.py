"""Owner: whose a stream is. Rows, blocks and prefill are shared among owners by weight."""

from typing import Final, NamedTuple


class Owner(NamedTuple):
    """A tenant, as the gateway knows it."""

    tenant: str = ""
    weight: float = 1.0
    """Its share, beside the weights of the others that are here."""
    group: int = 0
    """Its class: while it wants anything, those of greater ones take nothing new."""


NOBODY: Final = Owner()

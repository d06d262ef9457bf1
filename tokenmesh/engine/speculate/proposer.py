"""The proposer of drafts that a model's config asks for."""

from typing import TYPE_CHECKING

from tokenmesh.shared.config.speculative import SpeculativeConfig

if TYPE_CHECKING:
    from tokenmesh.engine.speculate.lookup import LookupProposer


def make_proposer(config: SpeculativeConfig) -> "LookupProposer | None":
    """None: the config asks for no drafts."""
    if config.method is None:
        return None
    # imported here: an engine without drafts does not have it
    from tokenmesh.engine.speculate.lookup import LookupProposer

    return LookupProposer(config)

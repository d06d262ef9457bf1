"""The proposer of drafts that a model's config asks for."""

from sys import maxsize
from typing import TYPE_CHECKING

from tokenmesh.engine.runner import Runner
from tokenmesh.engine.speculate.runner_drafts import RunnerDrafts
from tokenmesh.shared.config.speculative import SpeculativeConfig

if TYPE_CHECKING:
    from tokenmesh.engine.speculate.lookup import LookupProposer


def make_proposer(
    config: SpeculativeConfig, runner: Runner
) -> "LookupProposer | RunnerDrafts | None":
    """None: the config asks for no drafts, and the model takes none of a request's prediction.

    Raises ConfigError where the runner has no drafter."""
    if config.method is None and not runner.takes_drafts:
        return None
    max_rows = config.max_rows(maxsize, has_states=runner.has_states)
    if config.is_drafted:
        return RunnerDrafts(runner, max_rows, config.max_drafts, tree=config.tree)
    # imported here: an engine without drafts does not have it
    from tokenmesh.engine.speculate.lookup import LookupProposer

    return LookupProposer(config, max_rows)

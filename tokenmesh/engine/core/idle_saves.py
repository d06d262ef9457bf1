"""Saves of an engine that has nothing else to do: blocks that no later step would save."""

import logging

from tokenmesh.engine.kv.prefix_cache import PrefixCache
from tokenmesh.engine.plan import StepPlan
from tokenmesh.engine.runner import Runner

logger = logging.getLogger(__name__)


def save_rest(runner: Runner, cache: PrefixCache, plan: StepPlan) -> None:
    """Carry out a plan of `Scheduler.plan_saves`; no step may be in flight. Blocks as long as a
    short step does."""
    if not plan.host_saves:
        if cache.host is not None:
            # every slot is held: these are saved when they are used again
            cache.host.give_up_saves()
        return
    is_saved = False
    try:
        runner.launch(plan).result()
        is_saved = True
    # any error of a device: what was to be saved is computed again where it is needed
    except Exception as error:
        logger.warning("blocks were not saved to the host tier: %s", error)
    cache.images.landed(plan.step, ok=is_saved)

"""Bugs planted on purpose: the random schedules must notice each of them.

A mutant is a method with one piece of its source replaced. When the source has changed so that
the piece is not there any more, plant the bug anew.
"""

import inspect
import logging
import sys
import textwrap
from typing import Any, NamedTuple

import pytest

from tests.fakes.engine_schedules import Schedule
from tests.fakes.kv_runner import KvRunner
from tokenmesh.engine.core import engine as engine_module
from tokenmesh.engine.core import in_flight, landing, outputs, speculating
from tokenmesh.engine.core.decode_wheel import DecodeWheel
from tokenmesh.engine.core.engine import Engine
from tokenmesh.engine.core.host_fills import HostFills
from tokenmesh.engine.core.landing import Landing
from tokenmesh.engine.core.live_requests import LiveRequests
from tokenmesh.engine.core.prefill import Prefill
from tokenmesh.engine.core.row_table import RowTable
from tokenmesh.engine.core.scheduler import Scheduler
from tokenmesh.engine.core.speculating import Speculating
from tokenmesh.engine.kv.block_tables import BlockTables
from tokenmesh.engine.kv.exchange import KvExchange
from tokenmesh.engine.kv.host_tier import HostTier
from tokenmesh.engine.kv.keys import BlockKeys
from tokenmesh.engine.kv.lookup import PrefixLookup
from tokenmesh.engine.kv.prefix_cache import PrefixCache
from tokenmesh.engine.kv.prompt_images import PromptImages
from tokenmesh.engine.kv.saved_states import SavedStates
from tokenmesh.engine.speculate.runner_drafts import RunnerDrafts

MAX_SCHEDULES = 1500


class Mutant(NamedTuple):
    """Where, what, and how much trouble it takes to see it."""

    owner: Any
    method: str
    piece: str
    planted: str
    trouble: float = 0.0
    has_boundary: bool = False
    """True where keys change past a length, as those of longrope do."""
    has_states: bool = False
    has_drafts: bool = False
    max_proposed: int = 0
    has_host: bool = False
    has_windows: bool = False
    first: int = 0
    """Where to begin: hundreds of schedules before it notice nothing."""


MUTANTS = {
    "no limit of what is scheduled ahead": Mutant(
        Scheduler, "_pass_border", "length == request.decode_end:", "False:"
    ),
    "blocks published before their tokens are known": Mutant(
        Scheduler, "_pass_border", "length <= len(request.token_ids)", "True"
    ),
    "the new owner of a row takes the old one's token": Mutant(
        RowTable, "take_stale", "last >= step", "False"
    ),
    "a row is taken from its new owner for too long": Mutant(
        RowTable, "take_stale", "last >= step", "True"
    ),
    "one of two that need a block has given way and gets it": Mutant(
        Scheduler, "_decode", "not is_short or request in self._wheel", "True"
    ),
    "an end is not expected": Mutant(
        Scheduler, "_pass_border", "request.spec.max_len - 1", "request.spec.max_len"
    ),
    "row changes of a step that is not launched are lost": Mutant(
        RowTable, "note_step", "if plan.num_rows:", "if True:"
    ),
    "blocks freed and still held": Mutant(
        BlockTables, "release", "request.kv.blocks, request.kv.windowed = [], []", "pass"
    ),
    "a late token goes to the first stream that lost the row": Mutant(
        RowTable, "expect_no_late", "self._late.clear()", "pass"
    ),
    "a late token of a failed step is accepted": Mutant(
        Landing, "drop_rows", "self._rows.expect_no_late()", "pass", 0.3, first=730
    ),
    "a failed row is not followed into the step on top": Mutant(
        Landing, "land", "for each in later]", "for each in ()]", 0.15
    ),
    "a step on top of a failed one counts": Mutant(
        Engine, "_fail", "[(each, each.rows) for each in lost]", "[(lost[0], lost[0].rows)]", 0.15
    ),
    "rows removed on top of a failed step stay": Mutant(
        Engine, "_fail", "for each in lost:", "for each in lost[:1]:", 0.15
    ),
    "rows removed in a failed step stay": Mutant(
        Engine, "_fail", "for each in lost:", "for each in lost[1:]:", 0.15
    ),
    "blocks that were not written can be found": Mutant(
        PrefixCache, "retract", "self.pool.forget(each.block)", "pass", 0.15
    ),
    "readers of unwritten blocks go on": Mutant(
        in_flight,
        "corrupted_by",
        "unwritten.isdisjoint(hits.get(row, ()))",
        "True",
        0.15,
    ),
    "borders forgotten when a block is added": Mutant(
        DecodeWheel, "expect_border", "else capacity + 1", "else capacity + 9"
    ),
    "half of the prompt's logprobs": Mutant(
        outputs, "_take_prompt_logprobs", "not is_whole", "request.decode.is_prefilling"
    ),
    "a sequence that outgrows its keys goes on with them": Mutant(
        DecodeWheel, "expect_border", "request.decode_end < border", "False", has_boundary=True
    ),
    "keys of a shorter sequence are found by a longer one": Mutant(
        BlockKeys,
        "hash_up_to",
        "request.block_salt",
        "request.spec.cache_salt",
        has_boundary=True,
    ),
    "hashes outlive the keys they stand for": Mutant(
        BlockKeys, "choose_side", "request.kv.hashes = []", "pass", has_boundary=True
    ),
    "a state is found before it is saved": Mutant(
        SavedStates, "find", "None if saved in self._fresh else saved", "saved", has_states=True
    ),
    "a state that is replaced can still be found": Mutant(
        SavedStates, "drop", "del self._by_key[saved.key]", "pass", has_states=True
    ),
    "a state outlives the blocks that it needs": Mutant(
        PrefixCache, "_note_forgotten", "self._states.needs_blocks", "False", has_states=True
    ),
    "states that were not computed can be found": Mutant(
        PrefixCache,
        "retract_states",
        "self.reports.hide(self._states.drop(each))",
        "pass",
        0.15,
        False,
        True,
    ),
    "who began with a state that was not computed goes on": Mutant(
        in_flight,
        "corrupted_by",
        "states.get(row) not in unsaved",
        "True",
        0.15,
        False,
        True,
        first=560,
    ),
    "a hit goes beyond the saved state": Mutant(
        PrefixLookup, "_up_to_state", "found[: next(", "found[: 1 + next(", has_states=True
    ),
    "a state is saved behind other tokens": Mutant(
        PrefixCache, "_save_state", "request.kv.num_matched) != end", "0) is None", has_states=True
    ),
    "right drafts count as not computed": Mutant(
        Speculating,
        "land",
        "self._wheel.advance(request, request.num_known - 1 - first)",
        "pass",
        has_drafts=True,
    ),
    "the last token counts as computed like the drafts before it": Mutant(
        Speculating,
        "land",
        "request, first, request.num_known - 1",
        "request, first, request.num_known",
        has_drafts=True,
    ),
    "tokens past the end are sent": Mutant(
        speculating, "_append", "del new[index + 1 :]", "pass", has_drafts=True
    ),
    "a stream draws on past its end": Mutant(
        speculating, "_append", "request.ending() is not None", "False", has_drafts=True
    ),
    "drafts where max_tokens ends the stream": Mutant(
        Speculating, "_add_drafts", "request.decode_end - 1", "request.decode_end", has_drafts=True
    ),
    "drafts without blocks": Mutant(
        Speculating,
        "_grow",
        "min(num_drafts, request.kv.capacity - request.num_known)",
        "num_drafts",
        has_drafts=True,
    ),
    "drafts beyond the budget": Mutant(
        Speculating,
        "_add_drafts",
        "budget -= entry.num_computed - entry.num_tokens",
        "pass",
        has_drafts=True,
    ),
    "a stream is scheduled before its tokens are there": Mutant(
        Speculating, "_landed", "if each.num_known > each.num_computed", "", has_drafts=True
    ),
    "drafts that go on past a sequence's boundary": Mutant(
        Speculating,
        "begin_step",
        "request.num_known == request.decode_end",
        "False",
        has_boundary=True,
        has_drafts=True,
    ),
    "drafts of the runner outlive their stream": Mutant(
        RunnerDrafts, "forget", "self._by_request.pop(request, None)", "pass", max_proposed=3
    ),
    "a block that the step gives away is saved": Mutant(
        HostTier, "take_saves", "pool.find(key) == block", "True", has_host=True
    ),
    "an image is found before its step has landed": Mutant(
        HostTier,
        "take_saves",
        "self._saving[key] = slot",
        "self._saving[key] = self._ready[key] = slot",
        has_host=True,
    ),
    "an image of a failed step is found": Mutant(
        Engine, "_fail", "each.plan.step, ok=False", "each.plan.step, ok=True", 0.3, has_host=True
    ),
    "an image of a block that was not computed is found": Mutant(
        PrefixCache, "retract", "self.host.discard(each.key)", "pass", 0.3, has_host=True
    ),
    "a slot that a step reads is given away": Mutant(
        HostTier, "_hold", "self._evictable.pop(key, None)", "pass", has_host=True
    ),
    "a wrong load is accepted": Mutant(
        HostTier, "finish", "if is_good:", "if True:", has_host=True
    ),
    "a lent image gives way": Mutant(
        KvExchange, "lend", "host.pin(keys[: len(slots)])", "pass", has_host=True
    ),
    "images of a request are kept for ever": Mutant(
        LiveRequests, "remove", "self._cache.images.unpin(request)", "pass", has_host=True
    ),
    "images of a wrong load are kept for a request": Mutant(
        KvExchange,
        "arrived",
        "finish(keys, are_good",
        "finish(keys, [True] * len(keys)",
        has_host=True,
    ),
    "blocks are not filled": Mutant(
        Prefill, "_compute", "list(fills.entries)", "[]", has_host=True
    ),
    "window groups are not filled": Mutant(
        PromptImages,
        "fill",
        "zip(self._marks, (kv.blocks, *kv.windowed), strict=True)",
        "[(b'', kv.blocks)]",
        has_host=True,
        has_windows=True,
    ),
    "fills go on past the blocks of window groups": Mutant(
        HostFills, "_most", "if request.kv.windowed:", "if False:", has_host=True, has_windows=True
    ),
    "a device that does not keep the order": Mutant(
        KvRunner, "run_until", "self._queue.popleft()", "self._queue.pop()"
    ),
    "a device that changes rows too early": Mutant(
        KvRunner, "launch", "self.run_some()", "self._prepare(plan)"
    ),
}


def plant(mutant: Mutant, patch: pytest.MonkeyPatch) -> None:
    """Put the mutant in the place of what it was made of."""
    original = getattr(mutant.owner, mutant.method)
    source = textwrap.dedent(inspect.getsource(original))
    assert source.count(mutant.piece) == 1, "the source has changed"
    scope: dict[str, Any] = {}
    module = sys.modules[original.__module__]
    exec(source.replace(mutant.piece, mutant.planted), vars(module), scope)
    patch.setattr(mutant.owner, mutant.method, scope[mutant.method])
    if mutant.owner is in_flight:
        patch.setattr(landing, mutant.method, scope[mutant.method])


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_noticed(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger=engine_module.__name__)
    mutant = MUTANTS[name]
    plant(mutant, monkeypatch)
    for seed in range(mutant.first, mutant.first + MAX_SCHEDULES):
        try:
            Schedule(
                2_000_000 + seed,
                mutant.trouble,
                is_async=True,
                has_boundary=mutant.has_boundary,
                has_states=mutant.has_states,
                has_drafts=mutant.has_drafts,
                max_proposed=mutant.max_proposed,
                has_host=mutant.has_host,
                has_windows=mutant.has_windows,
            ).run()
        except Exception:
            return
    raise AssertionError(f"{MAX_SCHEDULES} schedules did not notice")

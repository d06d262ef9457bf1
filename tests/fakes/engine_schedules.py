"""Random schedules of requests for an engine without a model, and what must come of them."""

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from random import Random
from typing import Any

import msgspec

from tests.fakes.drafts import DiceProposer, FreeDrafts
from tests.fakes.kv_fetches import Fetches, Loads
from tests.fakes.kv_runner import (
    INJECTED,
    VOCAB,
    Cells,
    KvRunner,
    cell_after,
    draw_from,
    first_cell,
    media_mark,
)
from tokenmesh.engine.core.engine import Engine
from tokenmesh.engine.core.speculating import DraftTotals
from tokenmesh.engine.kv.block_log import BlockChange
from tokenmesh.engine.kv.block_pool import BlockPool, KvGroups
from tokenmesh.engine.kv.block_tables import held_by
from tokenmesh.engine.kv.prefix_cache import PrefixCache
from tokenmesh.engine.kv.saved_states import SavedStates
from tokenmesh.engine.request.request import Request, Status
from tokenmesh.engine.request.spec import (
    NO_TENANT,
    Ending,
    RequestSpec,
    StreamKey,
    TenantShare,
)
from tokenmesh.engine.speculate.runner_drafts import RunnerDrafts
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.ids import BlobKey, GatewayId, RequestId
from tokenmesh.shared.messages.media import MediaItem
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.messages.tokens import Delta, TokenLogprobs
from tokenmesh.shared.tokens import unpack_ids

EOS = frozenset({0, 1})
MAX_STEPS = 900


@dataclass
class Case:
    """A request, what it must produce, and what came."""

    request: Request
    prompt: list[int]
    expected: list[int]
    ending: Ending
    arrives: int
    received: list[int]
    finishes: list[Delta] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    is_cancelled: bool = False
    num_together: int = 0
    """Tokens that came along with one before them."""

    def change_spec(self, **fields: Any) -> None:
        """Before the request enters an engine."""
        known = list(self.request.token_ids)
        self.request = Request(replace(self.request.spec, **fields), known)

    @property
    def has_crossed(self) -> bool:
        """Return whether it outgrew its rope boundary while it was decoded here."""
        start, boundary = self.request.num_prompt, self.request.spec.rope_boundary
        resumed = start + self.request.output.num_resumed
        return boundary is not None and resumed <= boundary < start + len(self.received) - 1

    def receive(self, delta: Delta) -> None:
        assert not self.finishes, "something came after the end"
        self.num_together += max(0, len(delta.token_ids) // 4 - 1)
        assert delta.offset == len(self.received), "a gap or a duplicate"
        self.received += unpack_ids(delta.token_ids)
        if delta.prompt_logprobs is not None:
            assert self.prompt_logprobs is None, "prompt logprobs came twice"
            ids = [entry and entry.token_id for entry in delta.prompt_logprobs]
            assert ids == [None, *self.prompt[1:]], "not the prompt's"
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.finish is not None:
            self.finishes.append(delta)


def unbatched(request: Request, prompt: list[int]) -> tuple[list[int], Ending]:
    """The whole output of a request that runs alone, by the rules of the API."""
    tokens = list(prompt)
    cells: Cells = []
    sampling = request.spec.sampling
    boundary = request.spec.rope_boundary
    while True:
        if len(tokens) - 1 == boundary:
            cells.clear()
        for at in range(len(cells), len(tokens)):
            before = cells[-1] if cells else first_cell(boundary, len(tokens))
            cells.append(cell_after(before, tokens[at], media_mark(request.spec.media, at)))
        token = draw_from(cells)
        tokens.append(token)
        count = len(tokens) - len(prompt)
        if count >= sampling.min_tokens:
            if token in EOS and not sampling.ignore_eos:
                return tokens[len(prompt) :], Ending("stop")
            if token in sampling.stop_token_ids:
                return tokens[len(prompt) :], Ending("stop", stop_token=token)
        if count >= sampling.max_tokens:
            return tokens[len(prompt) :], Ending("length")


def endless(case: Case) -> list[int]:
    """Return what the request would draw if nothing but max_tokens ended it."""
    free = {"ignore_eos": True, "stop_token_ids": [], "min_tokens": 0}
    spec = case.request.spec
    spec = replace(spec, sampling=msgspec.structs.replace(spec.sampling, **free))
    return unbatched(Request(spec, list(case.request.token_ids)), case.prompt)[0]


def random_settings(rng: Random, is_async: bool) -> WorkerSettings:
    return WorkerSettings(
        async_scheduling=is_async,
        max_num_seqs=rng.randint(1, 5),
        max_num_batched_tokens=rng.choice([1, 2, 5, 9, 30, 60]),
        long_prefill_token_threshold=rng.choice([0, 0, 1, 4]),
        block_size=rng.choice([1, 2, 3, 4]),
        enable_prefix_caching=rng.random() < 0.85,
        kv_watermark=rng.choice([0.0, 0.0, 0.2]),
        max_step_failures=1000,
    )


def random_media(rng: Random, num_prompt: int) -> list[MediaItem]:
    if num_prompt < 3 or rng.random() < 0.8:
        return []
    offset = rng.randrange(num_prompt - 1)
    length = rng.randint(1, num_prompt - offset)
    # equal content has equal length, as with real images
    content_hash = f"{rng.randrange(2)}{length:02}"
    return [
        MediaItem(
            kind="image",
            content_hash=content_hash,
            offset=offset,
            length=length,
            pixels=BlobKey("p"),
        )
    ]


def random_owner(rng: Random) -> TenantShare:
    weight, group = rng.choice([1.0, 1.0, 3.0, 0.01]), rng.choice([0, 0, 0, 1])
    return TenantShare(rng.choice("ab"), weight, group) if rng.random() < 0.8 else NO_TENANT


def random_case(
    rng: Random, stream: int, capacity: int, spread: int, boundary: int | None, *, alike: bool
) -> Case:
    num_prompt = rng.randint(1, min(20, capacity))
    kind = 0 if alike else rng.randrange(2)
    prompt = [(at * (3 + kind)) % VOCAB for at in range(num_prompt)]
    if not alike and rng.random() < 0.3:
        prompt[rng.randrange(num_prompt)] = rng.randrange(VOCAB)
    max_tokens = rng.randint(1, min(16, capacity - num_prompt + 1))
    sampling = SamplingParams(
        seed=stream,
        max_tokens=max_tokens,
        min_tokens=rng.choice([0, 0, 0, max_tokens]),
        stop_token_ids=rng.choice([[], [5, 6, 7], [0]]),
        ignore_eos=rng.random() < 0.5,
        prompt_logprobs=rng.choice([None, None, None, 1]),
    )
    request = Request(
        RequestSpec(
            key=StreamKey(GatewayId(f"g{stream % 2}"), stream, 0),
            request_id=RequestId(f"r{stream}"),
            num_prompt=num_prompt,
            sampling=sampling,
            eos_ids=EOS,
            media=[] if alike else random_media(rng, num_prompt),
            priority=rng.choice([0, 0, 0, 1, -1]),
            cache_salt=None if alike else rng.choice([None, None, None, "s"]),
            rope_boundary=boundary,
        ),
        prompt,
    )
    expected, ending = unbatched(request, prompt)
    resumed = expected[: rng.randint(0, len(expected))] if rng.random() < 0.2 else []
    request = Request(request.spec, prompt + resumed)
    return Case(request, list(prompt), expected, ending, rng.randrange(spread), list(resumed))


def check_states(states: SavedStates | None, pool: BlockPool) -> None:
    """Each slot is free or found by one hash, and what a saved state needs can be found."""
    if states is None:
        return
    saved = list(states._by_key.values())
    assert all(states._by_key[each.key] is each for each in saved)
    slots = [each.slot for each in saved] + states._free
    assert sorted(slots) == list(range(len(slots))), "a slot is leaked or given away twice"
    assert not states._fresh
    behind = Counter(block for each in saved for block in each.hashes)
    assert behind == states._num_behind
    assert not states.needs_blocks or all(pool.find(block) is not None for block in behind)


class Schedule:
    """An engine, a runner with dice of its own, and requests that arrive and are cancelled."""

    def __init__(
        self,
        seed: int,
        trouble: float,
        is_async: bool,
        may_cancel: bool = True,
        has_tenants: bool = False,
        has_boundary: bool = False,
        has_windows: bool = False,
        has_states: bool = False,
        has_drafts: bool = False,
        max_proposed: int = 0,
        has_host: bool = False,
        num_lanes: int = 1,
    ) -> None:
        """max_proposed: drafts come from the runner."""
        rng = self._rng = Random(seed)
        self.settings = random_settings(rng, is_async)
        num_saved, has_pages = self._keep_states() if has_states else (0, True)
        num_blocks, windows = self._size_pool(has_windows)
        size, most = self.settings.block_size, self.settings.max_num_batched_tokens
        self.groups = KvGroups.of(windows, size, most)
        capacity = self.groups.longest(num_blocks - 1)
        self.cases, boundary = self._make_cases(capacity, has_boundary, has_host)
        if has_tenants:
            for case in self.cases:
                case.change_spec(owner=random_owner(rng))
        chances = rng.choice([(trouble, 0.0), (0.0, trouble), (trouble / 4, trouble / 2)])
        num_images = rng.choice([1, 2, 4, 12, 40]) if has_host else 0
        self.runner = KvRunner(
            self.settings,
            num_blocks,
            Random(seed + 1),
            *chances,
            boundary,
            windows,
            num_saved,
            has_pages,
            max_proposed,
            num_images,
        )
        self.runner.num_lanes = num_lanes
        self._loads = Loads(Random(seed + 3), self) if has_host else None
        self._fetches = Fetches(Random(seed + 4), self) if has_host else None
        self.proposer = self._make_proposer(seed) if has_drafts else None
        self.runner_drafts = self._take_runner_drafts() if max_proposed else None
        proposer = self.proposer or self.runner_drafts
        self.engine = Engine(self.runner, self.settings, proposer=proposer)
        self._added: list[Case] = []
        self._may_cancel, self._totals = may_cancel, DraftTotals()

    def _make_cases(
        self, capacity: int, has_boundary: bool, has_host: bool
    ) -> tuple[list[Case], int | None]:
        """And the rope boundary that they have in common."""
        rng = self._rng
        num_cases, spread, alike = rng.randint(1, 9), rng.choice([1, 3, 8]), rng.random() < 0.4
        if has_host:
            # one after the other, so that beginnings come back that the pool has lost
            num_cases, spread = rng.randint(6, 14), rng.choice([3, 20, 40])
        boundary = rng.randint(1, 30) if has_boundary else None
        streams = range(num_cases)
        cases = [
            random_case(rng, each, capacity, spread, boundary, alike=alike) for each in streams
        ]
        return cases, boundary

    def _size_pool(self, has_windows: bool) -> tuple[int, tuple[int | None, ...]]:
        rng = self._rng
        num_blocks = rng.randint(2, rng.choice([10, 20]))
        if not has_windows:
            return num_blocks, (None,)
        windows = (None, *[rng.randint(1, 12)] * rng.randint(1, 3))
        return rng.randint(6, 40), windows

    def _keep_states(self) -> tuple[int, bool]:
        """Slots for saved states, and whether layers keep pages too."""
        interval = self._rng.choice([1, 2, 4, 6])
        self.settings = self.settings.model_copy(update={"mamba_block_size": interval})
        return self._rng.choice([1, 2, 3, 8]), self._rng.random() < 0.7

    def _take_runner_drafts(self) -> RunnerDrafts:
        max_rows, most = self._rng.choice([1, 3, 1000]), self.runner.max_proposed
        return RunnerDrafts(self.runner, max_rows, self._rng.randint(1, most), FreeDrafts())

    def _make_proposer(self, seed: int) -> DiceProposer:
        outputs = {case.request.key: endless(case) for case in self.cases}
        rng = self._rng
        return DiceProposer(
            Random(seed + 2),
            lambda request: outputs[request.key],
            VOCAB,
            max_drafts=rng.choice([1, 3, 7]),
            max_rows=rng.choice([1, 3, 1000]),
            share_wrong=rng.choice([0.0, 0.3, 1.0]),
            share_resting=rng.choice([0.0, 0.0, 0.3]),
        )

    def run(self) -> Counter[str]:
        """To its end; how its requests ended and what happened on the way."""
        rng, engine = self._rng, self.engine
        arriving = sorted(self.cases, key=lambda case: case.arrives)
        for step in range(MAX_STEPS * self.runner.num_lanes):
            while arriving and (arriving[0].arrives <= step or not engine.has_work):
                self._added.append(arriving.pop(0))
                self._enter(self._added[-1].request)
            entered = [case for case in self._added if not self._is_fetching(case)]
            if self._may_cancel and rng.random() < 0.05 and entered:
                case = rng.choice(entered)
                case.is_cancelled = True
                engine.cancel(case.request.key)
                assert not case.request.kv.blocks
            if engine.has_work:
                engine.step()
                engine.wait_for_launch_window()
            self._receive()
            if not arriving and not engine.has_work and not self._has_fetches:
                break
        assert not engine.has_work, "the schedule does not come to an end"
        if self._fetches is not None and self._loads is not None:
            self._fetches.end()
            self._loads.end()
        for case in self.cases:
            self._check_outcome(case)
        assert self.runner_drafts is None or not self.runner_drafts._by_request
        counts = Counter[str](case.finishes[0].finish or "" for case in self.cases)
        counts["preempted"] = sum(case.request.place.num_preemptions for case in self.cases)
        counts["cached"] = sum(case.request.place.num_cached or 0 for case in self.cases)
        counts["filled"] = sum(case.request.place.num_filled for case in self.cases)
        counts["wasted"] = self.runner.num_wasted
        counts["crossed"] = sum(case.has_crossed for case in self.cases)
        counts["overlapped"] = self.runner.max_in_flight > 1
        counts["drafts"] = self.proposer.num_drafts if self.proposer is not None else 0
        counts["right drafts"] = sum(case.num_together for case in self.cases)
        return counts

    @property
    def _has_fetches(self) -> bool:
        fetches = self._fetches
        return fetches is not None and (fetches.has_news or bool(fetches.waiting))

    def _is_fetching(self, case: Case) -> bool:
        return self._fetches is not None and self._fetches.has(case.request)

    def _enter(self, request: Request) -> None:
        if self._fetches is None or not self._fetches.take(request):
            self.engine.add(request)

    def _receive(self) -> None:
        """Every waiting token is counted, and what requests hold is what the pool counts."""
        output = self.engine.take_output()
        for deltas in output.deltas.values():
            for delta in deltas:
                self.cases[delta.stream].receive(delta)
        requests = [case.request for case in self._added]
        absent = (Status.NEW, Status.ENDED)
        live = [request for request in requests if request.place.status not in absent]
        assert output.stats.queued_tokens == sum(request.backlog for request in live)
        assert all(
            request.place.status is Status.RUNNING for request in requests if request.kv.blocks
        )
        tables = (table for request in requests for table in held_by(request))
        holds = Counter(block for table in tables for block in table)
        assert output.stats.kv_blocks_used == len(holds), "a block is leaked or lost"
        pool = self.engine._pool
        free = list(pool._free)
        assert len(free) == len(set(free)) == pool.num_free
        assert all(pool.ref_count(block) == holds[block] for block in range(pool.num_blocks))
        assert holds.keys().isdisjoint(free)
        self._check_drafts(output.stats.drafts)
        self._check_published(live)
        check_states(self.engine._cache._states, pool)
        if self._fetches is not None and self._loads is not None:
            self._fetches.go_on()
            self._loads.go_on()
        self.note_blocks(output.blocks)

    def _check_drafts(self, totals: DraftTotals) -> None:
        """They are those of the streams, none of which got more than it drew, and never go down."""
        outputs = [case.request.output for case in self._added]
        accepted = sum(output.num_accepted for output in outputs)
        assert totals.draft_tokens == sum(output.num_drafts for output in outputs)
        assert totals.accepted_tokens == accepted == sum(totals.accepted_by_place)
        places = zip_longest(totals.accepted_by_place, self._totals.accepted_by_place, fillvalue=0)
        assert all(now >= before for now, before in places)
        numbers = zip(totals[:3], self._totals[:3], strict=True)
        assert all(now >= before for now, before in numbers)
        self._totals = totals

    def note_blocks(self, changes: list[BlockChange]) -> None:
        """Gets the changes of the prefix cache; does nothing by default."""
        assert not changes

    def _check_published(self, live: list[Request]) -> None:
        """A block that can be found is found under the hash of tokens that are known."""
        pool, size = self.engine._pool, self.settings.block_size
        kv_code = self.settings.kv_code
        cache = PrefixCache(pool.num_blocks, self.groups, enabled=True, kv_code=kv_code)
        cache.pool = pool
        for request in live:
            num_full = request.num_known // size
            fresh = Request(
                RequestSpec(
                    request.key,
                    request.spec.request_id,
                    request.num_prompt,
                    request.spec.sampling,
                    media=request.spec.media,
                    cache_salt=request.spec.cache_salt,
                    rope_boundary=request.spec.rope_boundary,
                    lora=request.spec.lora,
                ),
                list(request.token_ids),
            )
            fresh.prepared = request.prepared
            fresh.kv.is_long = request.kv.is_long
            cache.keys.hash_up_to(fresh, num_full)
            hashes = [pool._hashes[block] for block in request.kv.blocks]
            assert not any(hashes[num_full:]), "a block without known tokens can be found"
            assert all(
                found in (None, expected)
                for found, expected in zip(hashes[:num_full], fresh.kv.hashes, strict=False)
            ), "a block is found under a wrong hash"
            for mark, table in zip(cache._marks, request.kv.windowed, strict=False):
                for block, expected in zip(table, fresh.kv.hashes, strict=False):
                    assert pool._hashes[block] in (None, expected + mark)
                assert not any(pool._hashes[block] for block in table[num_full:])

    def _check_outcome(self, case: Case) -> None:
        """Ended once, with the tokens of an unbatched run."""
        (finish,) = case.finishes
        if finish.finish in ("abort", "error"):
            assert case.is_cancelled or finish.error is not None
            if finish.error is not None:
                # the engine survives any exception, that of a runner's failed check included
                assert finish.error.message in INJECTED, finish.error.message
                assert case.request.key.stream in self.runner.failed_streams, "ended for others"
            assert case.received == case.expected[: len(case.received)]
            return
        assert case.received == case.expected
        assert (finish.finish, finish.stop_token) == (case.ending.reason, case.ending.stop_token)
        if (
            case.request.spec.sampling.prompt_logprobs is not None
            and case.request.output.num_resumed == 0
        ):
            assert case.prompt_logprobs is not None

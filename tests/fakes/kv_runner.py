"""KvRunner: a runner whose tokens depend on what it finds in its own KV blocks.

It writes one number for each computed position into a simulated KV memory: a hash of the token
and of the number it finds one position before. It draws a token as a hash of everything that it
reads back through the row's block table. A block that is lost, shared while written, reused too
early or wrongly found by its hash changes a token. Where rows keep states, a state is the numbers
of all positions so far: a saved state that is wrong changes a token as well. Launches run in order,
and each as late or as early as the dice say.
"""

from collections import Counter, deque
from dataclasses import dataclass, field
from random import Random

from tokenmesh.engine.kv.host_tier import SAVED_BYTES
from tokenmesh.engine.plan import (
    NewRow,
    ScheduledRow,
    StepPlan,
    StepResult,
)
from tokenmesh.engine.runner import HostImages
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.messages.media import MediaItem
from tokenmesh.shared.messages.tokens import TokenLogprobs

VOCAB = 40
MODULUS = (1 << 61) - 1
UNWRITTEN = -1
ROW_FAILED = "row failed"
INJECTED = (ROW_FAILED, "RuntimeError: prepare failed", "MemoryError: forward failed")

Cells = list[int]


def cell_after(previous: int, token: int, media: int) -> int:
    """Return the number of a position: it depends on everything before it, as real KV does."""
    return (previous * 1_000_003 + token * 8191 + media + 3) % MODULUS


def in_group(cell: int, group: int) -> int:
    """Return the number that a window group's layers keep of a position."""
    return cell * 31 + group + 1


def first_cell(boundary: int | None, num_known: int) -> int:
    """Return the number before the first position: each side of the boundary has its own."""
    return 7 if boundary is None or num_known <= boundary else 11


def draw_from(cells: Cells) -> int:
    """The token after a context."""
    return ((sum(cells) * 1_000_003) % MODULUS >> 17) % VOCAB


def media_mark(media: list[MediaItem], position: int) -> int:
    """Return the mark of an image at a position; -1 where there is none."""
    for item in media:
        if item.offset <= position < item.offset + item.length:
            return int(item.content_hash, 16) * 1000 + position - item.offset
    return -1


@dataclass
class KvRow:
    """A row as the runner keeps it."""

    new: NewRow
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    windowed: list[list[int]] = field(default_factory=list)
    num_computed: int = 0
    has_failed: bool = False
    state: Cells = field(default_factory=list)

    @property
    def stream(self) -> int:
        return self.new.sampling.seed


class KvLaunch:
    """A step that runs when the dice say so, at the latest when its result is wanted."""

    def __init__(self, runner: "KvRunner", plan: StepPlan, below: "KvLaunch | None") -> None:
        self.plan = plan
        self.below = below
        self.outcome: StepResult | Exception | None = None
        self.is_taken = False
        self._runner = runner

    def wait(self, timeout_s: float) -> bool:
        self._runner.run_some()
        return self.outcome is not None

    def result(self) -> StepResult:
        self._runner.run_until(self)
        self.is_taken = True
        if isinstance(self.outcome, Exception):
            raise self.outcome
        assert self.outcome is not None
        return self.outcome


class KvRunner:
    """Simulated KV memory; the shares of rows and of steps that fail are given."""

    def __init__(
        self,
        settings: WorkerSettings,
        num_blocks: int,
        rng: Random,
        row_trouble: float,
        step_trouble: float,
        boundary: int | None = None,
        windows: tuple[int | None, ...] = (None,),
        num_saved_states: int = 0,
        has_pages: bool = True,
        max_proposed: int = 0,
        num_images: int = 0,
    ) -> None:
        """num_saved_states: 0: rows keep no states."""
        self.takes_drafts = True
        self.max_proposed = max_proposed
        self.windows = windows
        self.has_states = num_saved_states > 0
        self.has_pages = has_pages
        self.num_saved_states = num_saved_states
        self.images = HostImages(num_images, SAVED_BYTES // 2)
        self.has_own_device = True
        self.num_lanes = 1
        self.num_blocks = num_blocks
        self.num_wasted = 0
        """Launches on top of a failed one."""
        self.max_in_flight = 0
        self.failed_streams: set[int] = set()
        """Streams that had a reason to end with an error."""
        self._size = settings.block_size
        self._max_tokens = settings.max_num_batched_tokens
        self._rng = rng
        self._row_trouble = row_trouble
        self._step_trouble = step_trouble
        self._boundary = boundary
        self._rows: dict[int, KvRow] = {}
        self._cells: dict[tuple[int, int], int] = {}
        self._saved: dict[int, Cells] = {}
        self.arena: dict[tuple[int, int], int] = {}
        """The images, by slot and position; loads write here at any time."""
        self._queue: deque[KvLaunch] = deque()
        self._last: KvLaunch | None = None

    def launch(self, plan: StepPlan) -> KvLaunch:
        below = self._last if self._last is not None and not self._last.is_taken else None
        self._last = KvLaunch(self, plan, below)
        self._queue.append(self._last)
        self.max_in_flight = max(self.max_in_flight, len(self._queue))
        self.run_some()
        return self._last

    def run_some(self) -> None:
        """Run any number of waiting launches."""
        while self._queue and self._rng.random() < 0.4:
            self._run(self._queue.popleft())

    def run_until(self, launch: KvLaunch) -> None:
        """Run what was launched before, then the launch itself."""
        while launch.outcome is None:
            self._run(self._queue.popleft())

    def _run(self, launch: KvLaunch) -> None:
        below, launch.below = launch.below, None
        if below is not None and isinstance(below.outcome, Exception):
            self.num_wasted += 1
            launch.outcome = RuntimeError("the step below failed")
            return
        try:
            launch.outcome = self._carry_out(launch.plan)
        # a failed check included: its message distinguishes it from injected ones
        except Exception as error:
            launch.outcome = error
            self.failed_streams |= self._streams_of(launch.plan)

    def _streams_of(self, plan: StepPlan) -> set[int]:
        new = {new.row: new.sampling.seed for new in plan.new_rows}
        return {new[row] if row in new else self._rows[row].stream for row in plan.rows}

    def _carry_out(self, plan: StepPlan) -> StepResult:
        entries = self._prepare(plan)
        self._fill(plan)
        contexts = self._forward(entries)
        for saved in plan.saves:
            assert 0 <= saved.slot < self.num_saved_states
            self._saved[saved.slot] = list(self._rows[saved.row].state)
        assert len({each.slot for each in plan.saves}) == len(plan.saves), "a slot is written twice"
        for block, slot in plan.host_saves:
            for at in range(self._size):
                self.arena[slot, at] = self._cells.get((block, at), UNWRITTEN)
        return self._sample(entries, contexts)

    def _prepare(self, plan: StepPlan) -> list[ScheduledRow]:
        if self._rng.random() < self._step_trouble / 2:
            raise RuntimeError("prepare failed")
        for row in plan.removed_rows:
            self._rows.pop(row, None)
        for new in plan.new_rows:
            assert new.row not in self._rows
            windowed: list[list[int]] = [[] for _ in self.windows[1:]]
            state = [] if new.state is None else list(self._saved[new.state])
            self._rows[new.row] = KvRow(new, list(new.token_ids), windowed=windowed, state=state)
        for number, block in plan.grown:
            self._rows[number].blocks.append(block)
        for number, blocks in plan.grown_windowed:
            self._append_windowed(number, [[block] for block in blocks])
        for entry in plan.scheduled:
            self._rows[entry.row].blocks += entry.new_blocks
            if entry.new_windowed:
                self._append_windowed(entry.row, entry.new_windowed)
        assert plan.num_tokens <= self._max_tokens, "more than the budget"
        entries = [
            ScheduledRow(number, self._rows[number].num_computed, 1, [], True)
            for number in plan.decodes
        ] + plan.scheduled
        for entry in entries:
            self._rows[entry.row].num_computed = entry.start + entry.num_tokens
        self._check_writes(entries, {new.row for new in plan.new_rows})
        return entries

    def _fill(self, plan: StepPlan) -> None:
        for entry in plan.scheduled:
            row = self._rows[entry.row]
            own = {block for table in (row.blocks, *row.windowed) for block in table}
            for block, slot in entry.fills:
                assert block in own, "a block of another row is filled"
                for at in range(self._size):
                    self._cells[block, at] = self.arena[slot, at]

    def _append_windowed(self, number: int, blocks: list[list[int]]) -> None:
        for table, new in zip(self._rows[number].windowed, blocks, strict=True):
            table += new

    def _check_writes(self, entries: list[ScheduledRow], admitted: set[int]) -> None:
        holders = Counter(
            block
            for row, state in self._rows.items()
            if row not in admitted
            for block in state.blocks
        )
        assert len({entry.row for entry in entries}) == len(entries), "a row is scheduled twice"
        for entry in entries:
            row = self._rows[entry.row]
            end = entry.start + entry.num_tokens + len(entry.drafts)
            assert entry.num_tokens > 0
            assert end - len(entry.drafts) <= len(row.tokens), "computed before it is drawn"
            assert entry.samples or not entry.drafts
            assert end < row.new.num_prompt + row.new.sampling.max_tokens, "computed past the end"
            last = (end - 1) // self._size
            for block in row.blocks[entry.start // self._size : last + 1]:
                assert block != 0, "the null block has no owner"
                assert holders[block] <= (entry.row not in admitted), "written while shared"
            assert last < len(row.blocks), "no block for a scheduled token"
            for table in row.windowed:
                assert 0 not in table[entry.start // self._size : last + 1]
                assert last < len(table), "no block of a window group for a scheduled token"

    def _forward(self, entries: list[ScheduledRow]) -> dict[int, list[Cells]]:
        for entry in entries:
            row = self._rows[entry.row]
            row.has_failed |= self._rng.random() < self._row_trouble
            if row.has_failed:
                self.failed_streams.add(row.stream)
        will_crash = self._rng.random() < self._step_trouble / 2
        if will_crash and not entries:
            raise MemoryError("forward failed")
        crash_after = self._rng.randrange(len(entries)) if will_crash else None
        for index, entry in enumerate(entries):
            if index == crash_after:
                raise MemoryError("forward failed")
            row = self._rows[entry.row]
            known = entry.start + entry.num_tokens
            tokens = row.tokens[:known] + entry.drafts
            for position in range(entry.start, len(tokens)):
                first = first_cell(self._boundary, len(row.new.token_ids))
                before = self._before(row, position) if position else first
                mark = media_mark(row.new.media, position)
                cell = cell_after(before, tokens[position], mark)
                place = (row.blocks[position // self._size], position % self._size)
                self._cells[place] = UNWRITTEN if row.has_failed else cell
                row.state.append(self._cells[place])
                for group, table in enumerate(row.windowed):
                    # one memory: a block of one group is overwritten by that of another
                    place = (table[position // self._size], position % self._size)
                    self._cells[place] = UNWRITTEN if row.has_failed else in_group(cell, group)
        return {
            entry.row: [
                self._context(self._rows[entry.row], entry.start + entry.num_tokens + place)
                for place in range(len(entry.drafts) + 1)
            ]
            for entry in entries
            if entry.samples
        }

    def _context(self, row: KvRow, length: int) -> Cells:
        """Return the cells that the last query sees; one more if a window group holds others."""
        cells = [self._read(row, position) for position in range(length)]
        state = row.state[:length]
        if self.has_states and (cells != state and self.has_pages):
            return [*state, 1]
        if not self.has_pages:
            return state
        for group, table in enumerate(row.windowed):
            for position in range(max(0, length - (self.windows[1] or 0)), length):
                place = (table[position // self._size], position % self._size)
                if self._cells.get(place) != in_group(cells[position], group):
                    cells.append(1)
        return cells

    def _before(self, row: KvRow, position: int) -> int:
        """Return the cell of the position before, from the row's state or else its blocks."""
        if not self.has_states:
            return self._read(row, position - 1)
        assert len(row.state) == position, "the state of another position"
        return row.state[-1]

    def _read(self, row: KvRow, position: int) -> int:
        place = (row.blocks[position // self._size], position % self._size)
        return self._cells.get(place, UNWRITTEN)

    def _sample(self, entries: list[ScheduledRow], contexts: dict[int, list[Cells]]) -> StepResult:
        result = StepResult()
        for entry in entries:
            row = self._rows[entry.row]
            if row.has_failed:
                result.errors[entry.row] = ROW_FAILED
                row.tokens.append(0)
                continue
            if row.new.wants_prompt_logprobs:
                stop = min(entry.start + entry.num_tokens + 1, row.new.num_prompt)
                result.prompt_logprobs[entry.row] = [
                    TokenLogprobs(row.tokens[position], -1.0, 1)
                    for position in range(entry.start + 1, stop)
                ]
            if entry.samples:
                drawn = [draw_from(cells) for cells in contexts[entry.row]]
                num_right = 0
                while drawn[num_right : num_right + 1] == entry.drafts[num_right : num_right + 1]:
                    num_right += 1
                result.tokens[entry.row] = drawn[: num_right + 1]
                row.tokens += drawn[: num_right + 1]
                row.num_computed += num_right
                # the states go on without the drafts that were wrong
                del row.state[entry.start + entry.num_tokens + num_right :]
                if entry.num_proposed:
                    context = contexts[entry.row][num_right]
                    result.drafts[entry.row] = self._propose(row, context, entry.num_proposed)
        return result

    def _propose(self, row: KvRow, context: Cells, count: int) -> list[int]:
        """Return what the row would draw next, often cut, spoiled or nonsense."""
        assert 0 < count <= self.max_proposed
        cells, drafts = list(context), list[int]()
        if len(cells) != len(row.tokens) - 1:
            return drafts  # a window group has lost something
        while len(drafts) < count and self._rng.random() < 0.8:
            token = (row.tokens + drafts)[len(cells)]
            cells.append(cell_after(cells[-1], token, media_mark(row.new.media, len(cells))))
            drafts.append(draw_from(cells))
        if drafts and self._rng.random() < 0.2:
            drafts[self._rng.randrange(len(drafts))] = self._rng.randrange(VOCAB)
        return drafts

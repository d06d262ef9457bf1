"""The rows' state over many steps, against lists: staged writes, step inputs, post update.

The kernels are held to their references elsewhere; here the references are held to what a request
is, so that the three of them agree about counts and addresses.
"""

from dataclasses import dataclass, field
from itertools import accumulate

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmesh.kernels.post_update import post_update
from tokenmesh.kernels.staged_writes import staged_writes
from tokenmesh.kernels.step_inputs import RowState, StepTensors, step_inputs

PAGE_SIZE, NUM_ROWS, MAX_TOKENS, MAX_BLOCKS = 4, 5, 40, 10
CPU = torch.device("cpu")


@dataclass
class Request:
    """The expected state of one row."""

    prompt: list[int]
    computed: int
    sampled: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.sampled


class Mirror:
    """The state on a device and the same as lists."""

    def __init__(self) -> None:
        self.state = RowState.zeros(NUM_ROWS, MAX_TOKENS, MAX_BLOCKS, CPU)
        self.requests: dict[int, Request] = {}
        self._writes: list[tuple[int, list[int]]] = []
        self._next_block = 1
        self._next_token = 100

    def admit(self, row: int, num_prompt: int, num_cached: int) -> None:
        """Row `row` becomes a request whose first tokens are in the pages already."""
        state, prompt = self.state, self._new_tokens(num_prompt)
        self.requests[row] = Request(prompt, num_cached)
        self._stage(state.address(state.token_ids, row), prompt)
        self._stage(state.address(state.num_computed, row), [num_cached])
        self._stage(state.address(state.min_length, row), [num_prompt])

    def step(self, counts: dict[int, int], num_padding: int) -> None:
        """Compute so many tokens of each row, behind some padding; check all that comes out."""
        for row, count in counts.items():
            self._cover(row, self.requests[row].computed + count)
        self._apply()
        rows = torch.tensor([*([-1] * num_padding), *counts], dtype=torch.int32)
        sizes = [1] * num_padding + list(counts.values())
        starts = torch.tensor([0, *accumulate(sizes)], dtype=torch.int32)
        out = StepTensors.zeros(sum(sizes) + 3, len(rows), MAX_BLOCKS, CPU)
        step_inputs(rows, starts, self.state, PAGE_SIZE, out)
        for index, row in enumerate(rows.tolist()):
            self._check(out, index, row, range(int(starts[index]), int(starts[index + 1])))
        self._finish(rows, starts, counts)

    def _check(self, out: StepTensors, index: int, row: int, tokens: range) -> None:
        if row < 0:
            assert out.slots[list(tokens)].tolist() == [0]
            assert out.seq_lens[index] == 0
            return
        request = self.requests[row]
        assert out.seq_lens[index] == request.computed + len(tokens)
        for position, token in enumerate(tokens, start=request.computed):
            block, offset = request.blocks[position // PAGE_SIZE], position % PAGE_SIZE
            assert out.token_ids[token] == request.tokens[position]
            assert out.positions[token] == position
            assert out.slots[token] == block * PAGE_SIZE + offset
            assert out.tables[index, position // PAGE_SIZE] == block

    def _finish(self, rows: torch.Tensor, starts: torch.Tensor, counts: dict[int, int]) -> None:
        draws: list[int] = []
        sampled: list[int] = []
        for row in rows.tolist():
            request = self.requests.get(row)
            if request is None:
                draws.append(-1)
                continue
            request.computed += counts[row]
            is_caught_up = request.computed == len(request.tokens)
            draws.append(len(sampled) if is_caught_up else -1)
            if is_caught_up:
                sampled += self._new_tokens(1)
                request.sampled.append(sampled[-1])
        indices = torch.tensor(draws, dtype=torch.int32)
        post_update(rows, starts, indices, torch.tensor(sampled), self.state)

    def _cover(self, row: int, num_tokens: int) -> None:
        """Give the row the blocks that its first num_tokens tokens need."""
        blocks = self.requests[row].blocks
        missing = -(-num_tokens // PAGE_SIZE) - len(blocks)
        new = list(range(self._next_block, self._next_block + missing))
        self._next_block += missing
        self._stage(self.state.address(self.state.tables, row, len(blocks)), new)
        blocks += new

    def _stage(self, destination: int, values: list[int]) -> None:
        self._writes.append((destination, values))

    def _apply(self) -> None:
        # An admission over another in the same step would overlap: only the last one counts.
        writes = dict(self._writes)
        starts = [0, *accumulate(map(len, writes.values()))]
        staged_writes(
            self.state.flat,
            torch.tensor(list(writes), dtype=torch.int64),
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor([v for values in writes.values() for v in values], dtype=torch.int32),
        )
        self._writes = []

    def _new_tokens(self, count: int) -> list[int]:
        self._next_token += count
        return list(range(self._next_token - count, self._next_token))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_state_follows_requests_through_any_schedule(data: st.DataObject) -> None:
    mirror = Mirror()
    for _ in range(data.draw(st.integers(1, 8))):
        for row in data.draw(st.sets(st.integers(0, NUM_ROWS - 1))):
            if row not in mirror.requests or data.draw(st.booleans()):
                num_prompt = data.draw(st.integers(1, 20))
                mirror.admit(row, num_prompt, data.draw(st.integers(0, num_prompt - 1)))
        counts = {
            row: data.draw(st.integers(1, len(request.tokens) - request.computed))
            for row, request in mirror.requests.items()
        }
        mirror.step(counts, data.draw(st.integers(0, 2)))


def test_groups_have_tables_of_their_own_and_all_else_in_common() -> None:
    state = RowState.zeros(NUM_ROWS, MAX_TOKENS, MAX_BLOCKS, CPU, num_groups=3)
    groups = [state.of_group(number) for number in range(3)]
    for number, group in enumerate(groups):
        group.tables.fill_(number + 1)
        group.num_computed.add_(1)
    assert [set(group.tables.flatten().tolist()) for group in groups] == [{1}, {2}, {3}]
    assert state.num_computed.tolist() == [3] * NUM_ROWS
    assert not state.min_length.any()
    last = groups[2]
    state.flat[last.address(last.tables, NUM_ROWS - 1, MAX_BLOCKS - 1)] = 9
    assert last.tables[-1, -1] == 9

"""The number of KV blocks for which there is room: with scripted devices, to the byte."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokenmesh.engine.exec.memory import (
    HOST_POOL_BYTES,
    GpuBudget,
    MemoryBudget,
    Need,
    StoreSize,
    host_budget,
    need_of,
    size_store,
)
from tokenmesh.engine.host_memory import available_host_bytes
from tokenmesh.engine.kv.block_pool import KvGroups
from tokenmesh.engine.models.keeps import (
    Latent,
    LayerKeeps,
    Pages,
    State,
    one_group,
    window_groups,
)
from tokenmesh.engine.models.kv_store import make_store
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import ConfigError

GIB = 1 << 30
MIB = 1 << 20


class FakeGpu:
    """80 GiB, of which others hold some, and an allocator that keeps what was freed."""

    def __init__(self, others: float = 0.0) -> None:
        self.others = int(others * GIB)
        self.context = 0
        self.tensors = 0
        self.kept = 0
        self.highest = 0

    def total(self) -> int:
        return 80 * GIB

    def free(self) -> int:
        return self.total() - self.others - self.context - self.reserved()

    def allocated(self) -> int:
        return self.tensors

    def reserved(self) -> int:
        return self.tensors + self.kept

    def peak(self) -> int:
        return self.highest

    def reset_peak(self) -> None:
        self.highest = self.tensors

    def release(self) -> None:
        self.kept = 0

    def load(self, weights: float, context: float) -> None:
        self.tensors += int(weights * GIB)
        self.context += int(context * GIB)
        # of loading; no step needs it
        self.highest = self.tensors + 9 * GIB

    def step(self, activations: float, pool: float = 0.0) -> Callable[[], int]:
        def run() -> int:
            passing = int((activations + pool) * GIB)
            self.highest = max(self.highest, self.tensors + passing)
            self.kept += passing
            return int(pool * GIB)

        return run


def need(max_model_len: int = 32768, block_mib: int = 2) -> Need:
    return Need(block_mib * MIB, KvGroups(16), max_model_len, row_bytes=0)


def settings(**values: Any) -> WorkerSettings:
    return WorkerSettings.model_validate(values)


def never() -> MemoryBudget:
    raise AssertionError("nothing was to be measured")


def measured(gpu: FakeGpu, utilization: float, **steps: float) -> MemoryBudget:
    budget = GpuBudget(gpu, utilization)
    gpu.load(weights=15, context=0.5)
    return budget.measure(gpu.step(**steps))


def test_a_gpu_leaves_its_share_less_weights_peak_and_context() -> None:
    budget = measured(FakeGpu(), 0.9, activations=2.5)
    assert budget.num_bytes == int(0.9 * 80 * GIB) - int((15 + 2.5 + 0.5) * GIB)
    assert budget.setting == "gpu_memory_utilization"
    for part in ("72.00", "0.9 of 80.00", "weights 15.00", "activations 2.50", "CUDA 0.50"):
        assert part in budget.account


def test_the_pool_of_the_profile_itself_is_not_counted() -> None:
    with_pool = measured(FakeGpu(), 0.9, activations=2.5, pool=3)
    assert with_pool.num_bytes == measured(FakeGpu(), 0.9, activations=2.5).num_bytes


def test_what_other_processes_hold_counts_only_where_it_is_in_the_way() -> None:
    alone = measured(FakeGpu(), 0.45, activations=1)
    shared = measured(FakeGpu(others=36), 0.45, activations=1)
    assert shared.num_bytes == alone.num_bytes
    crowded = measured(FakeGpu(others=50), 0.45, activations=1)
    # 80 - 50 - 15 weights - 0.5 context - 1 of activations
    assert crowded.num_bytes == int(13.5 * GIB)


def test_what_was_there_before_the_start_is_not_this_workers() -> None:
    gpu = FakeGpu(others=10)
    gpu.kept = 2 * GIB
    budget = measured(gpu, 0.9, activations=1)
    assert "other processes hold 10.00" in budget.account
    assert "CUDA 0.50" in budget.account


def test_the_whole_budget_becomes_blocks_but_no_more_than_can_be_used() -> None:
    budget = MemoryBudget(40 * GIB + MIB, "gpu_memory_utilization", "")
    assert size_store(need(), settings(max_num_seqs=256), lambda: budget).num_blocks == 20 * 1024
    # three rows of 2048 blocks, and the null block
    assert size_store(need(), settings(max_num_seqs=3), lambda: budget).num_blocks == 3 * 2048 + 1


def test_what_is_set_is_taken_and_nothing_is_measured() -> None:
    assert size_store(need(), settings(num_gpu_blocks_override=3000), never).num_blocks == 3000
    exact = settings(kv_cache_memory_bytes=2500 * 2 * MIB + 1)
    assert size_store(need(), exact, never).num_blocks == 2500


def test_saved_states_get_a_quarter_of_what_one_request_leaves() -> None:
    # rows keep 1 GiB, one request of full length 2049 blocks of 2 MiB; a state has 10 MiB
    states = replace(need(), row_bytes=GIB, state_bytes=10 * MIB, num_saved=None, most_saved=512)
    enough = states.num_bytes

    def size(num_bytes: int, **set_to: Any) -> StoreSize:
        each = replace(states, **set_to)
        return size_store(each, settings(kv_cache_memory_bytes=num_bytes), never)

    assert size(enough) == (2049, 0)
    assert size(enough + 4 * GIB) == (2049 + 2048 - 102 * 5, 102)
    assert size(enough + 40 * GIB) == (2049 + 20 * 1024 - 512 * 5, 512)
    # those that are set are among what rows keep
    assert size(enough, num_saved=7) == (2049, 7)
    # blocks that hold nothing do not bound how many requests run
    every_row = 1 + settings().num_rows * 2048
    assert size(enough + 4 * GIB, block_bytes=0) == (min(every_row, 1 << 18), 204)
    with pytest.raises(ConfigError, match="raise kv_cache_memory_bytes"):
        size(enough - 1)
    fixed = settings(num_gpu_blocks_override=2049)
    assert size_store(states, fixed, never) == (2049, 512)


@pytest.mark.parametrize(
    ("values", "can_save", "num_saved"),
    [
        ({}, True, None),
        ({"saved_states": 5}, True, 5),
        ({"saved_states": 0}, True, 0),
        ({"saved_states": 5}, False, 0),
        ({"enable_prefix_caching": False}, True, 0),
    ],
)
def test_states_are_saved_where_they_are_of_use(
    values: dict[str, Any], can_save: bool, num_saved: int | None
) -> None:
    state = State((256,), torch.float32)
    keeps = ((state,), (Pages(2, 16, 16),))
    given = settings(max_num_seqs=3, **values)
    found = need_of(
        keeps, one_group(keeps), given, torch.float32, max_model_len=64, can_save=can_save
    )
    assert found.num_saved == num_saved
    assert found.row_bytes == 1024 * (4 + (num_saved or 0))
    plain = need_of(
        keeps[1:], one_group(keeps[1:]), given, torch.float32, max_model_len=64, can_save=can_save
    )
    assert plain.num_saved == plain.row_bytes == 0


def test_too_little_says_how_much_is_missing_and_what_to_change_to_what() -> None:
    gpu = FakeGpu()
    budget = GpuBudget(gpu, 0.25)
    gpu.load(weights=15, context=0.5)
    # 20 GiB share - 15 - 0.5 - 2.5 leave 2; 2049 blocks of 2 MiB are needed
    with pytest.raises(ConfigError) as error:
        size_store(need(), settings(), lambda: budget.measure(gpu.step(activations=2.5)))
    message = error.value.message
    assert "max_model_len 32768 needs 4.00 GiB of KV cache and there are 2.00" in message
    assert "2.00 GiB are missing" in message
    assert "raise gpu_memory_utilization to 0.28" in message
    assert f"lower max_model_len to {1023 * 16}" in message
    assert "max_num_batched_tokens or max_num_seqs" in message
    assert error.value.param == "gpu_memory_utilization"


@given(
    utilization=st.integers(5, 100).map(lambda each: each / 100),
    others=st.integers(0, 60),
    activations=st.integers(0, 8),
    max_model_len=st.integers(1, 200_000),
)
def test_the_advice_of_the_error_is_right(
    utilization: float, others: int, activations: int, max_model_len: int
) -> None:
    def attempt(share: float, length: int) -> str:
        gpu = FakeGpu(others)
        budget = GpuBudget(gpu, share)
        gpu.load(weights=15, context=0.5)
        measure = gpu.step(activations)
        try:
            size = size_store(need(length), settings(), lambda: budget.measure(measure))
        except ConfigError as error:
            return error.message
        assert size.num_blocks * 2 * MIB <= gpu.free() - activations * GIB
        return ""

    message = attempt(utilization, max_model_len)
    if "raise gpu_memory_utilization to " in message:
        advised = float(message.split("raise gpu_memory_utilization to ")[1].split()[0])
        assert advised > utilization
        again = attempt(advised, max_model_len)
        # others may be in the way then: that is what the second message is about
        assert again == "" or "raise" not in again
    if "lower max_model_len to " in message:
        fits = int(message.split("lower max_model_len to ")[1].split()[0])
        assert attempt(utilization, fits) == ""
        assert attempt(utilization, fits + 16) != ""


def test_nothing_is_advised_that_would_not_help() -> None:
    gpu = FakeGpu(others=63)
    budget = GpuBudget(gpu, 0.9)
    gpu.load(weights=15, context=0.5)
    with pytest.raises(ConfigError) as error:
        size_store(need(), settings(), lambda: budget.measure(gpu.step(activations=1)))
    assert "raise" not in error.value.message
    assert "there are 0.50" in error.value.message
    gpu.others += 2 * GIB
    with pytest.raises(ConfigError, match=r"there are 0\.00 .* lower max_model_len or max_num_b"):
        size_store(need(), settings(), lambda: budget.measure(gpu.step(activations=1)))


def test_a_step_that_does_not_fit_names_what_makes_it_large() -> None:
    def explode() -> int:
        raise torch.OutOfMemoryError("CUDA out of memory")

    gpu = FakeGpu()
    budget = GpuBudget(gpu, 0.9)
    gpu.load(weights=70, context=0.5)
    with pytest.raises(ConfigError, match=r"70\.00 GiB .* 80\.00; lower max_num_batched_tokens"):
        budget.measure(explode)


def test_the_error_of_a_fixed_size_names_the_smallest_that_does() -> None:
    with pytest.raises(ConfigError, match="raise num_gpu_blocks_override to 2049 or lower"):
        size_store(need(), settings(num_gpu_blocks_override=2048), never)
    assert size_store(need(), settings(num_gpu_blocks_override=2049), never).num_blocks == 2049
    enough = 2049 * 2 * MIB
    with pytest.raises(ConfigError, match=f"raise kv_cache_memory_bytes to {enough} or lower"):
        size_store(need(), settings(kv_cache_memory_bytes=enough - 1), never)
    assert size_store(need(), settings(kv_cache_memory_bytes=enough), never).num_blocks == 2049


def test_a_host_gives_a_share_of_what_is_free() -> None:
    assert host_budget(10 * GIB, 0.3).num_bytes == 3 * GIB
    with pytest.raises(
        ConfigError, match=r"raise cpu_memory_utilization to 0\.41 or lower"
    ) as error:
        size_store(need(), settings(), lambda: host_budget(10 * GIB, 0.3))
    assert "0.3 of the 10.00 GiB that are free" in error.value.message
    assert size_store(need(), settings(), lambda: host_budget(10 * GIB, 0.41)).num_blocks > 2048


def host(folder: Path, **files: str) -> int:
    meminfo = folder / "meminfo"
    meminfo.write_text("MemTotal:  100 kB\nMemAvailable:   50 kB\n")
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(text)
    return available_host_bytes(meminfo, folder)


def test_host_memory_is_bounded_by_the_container(tmp_path: Path) -> None:
    assert host(tmp_path) == 50 * 1024
    assert host(tmp_path, memory_max="max\n", memory_current="5", memory_stat="") == 50 * 1024
    stat = "anon 7\ninactive_file 1000\nactive_file 9\n"
    assert host(tmp_path, memory_max="30000\n", memory_current="20000", memory_stat=stat) == 11000
    assert host(tmp_path, memory_max="100", memory_current="9000", memory_stat=stat) == 0
    assert host(tmp_path, memory_max="99999999", memory_current="9", memory_stat=stat) == 50 * 1024


def test_a_host_that_does_not_state_its_memory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\n")
    with pytest.raises(ConfigError, match="does not state"):
        available_host_bytes(tmp_path / "meminfo", tmp_path)


@given(
    num_blocks=st.integers(0, 300),
    window=st.integers(1, 80),
    num_windowed=st.integers(0, 5),
    max_chunk=st.integers(1, 60),
)
def test_the_longest_sequence_is_the_longest_that_fits(
    num_blocks: int, window: int, num_windowed: int, max_chunk: int
) -> None:
    groups = KvGroups(4, max_chunk, window if num_windowed else 0, num_windowed)
    longest = groups.longest(num_blocks)
    assert groups.needed(longest) <= num_blocks < groups.needed(longest + 1)


def test_a_length_that_may_be_shorter_is_what_the_pool_holds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = replace(need(), may_be_shorter=True)
    with caplog.at_level("INFO"):
        assert size_store(asked, settings(num_gpu_blocks_override=101), never).num_blocks == 101
    assert asked.longest_in(101) == 1600
    assert "max_model_len auto: 1600 of the 32768 tokens" in caplog.text
    assert "100 of 100 KV blocks of 2.000 MiB" in caplog.text
    assert "num_gpu_blocks_override" not in caplog.text
    # with more than enough, the model's own length
    roomy = size_store(asked, settings(num_gpu_blocks_override=5000), never)
    assert asked.longest_in(roomy.num_blocks) == 32768


@pytest.mark.parametrize(
    ("share", "length", "expected"),
    [(0.3, 64, HOST_POOL_BYTES), (0.3, 32768, None), (0.31, 64, 3 << 30)],
)
def test_a_pool_in_host_memory_leaves_room_unless_a_share_is_set(
    share: float, length: int, expected: int | None
) -> None:
    # blocks of 16 tokens and 1 MiB
    asked = Need(block_bytes=MIB, groups=KvGroups(16), max_model_len=length, row_bytes=0)
    worker = settings(cpu_memory_utilization=share, max_num_seqs=4096)
    room = expected if share != 0.3 and expected else 15 << 30
    size = size_store(asked, worker, lambda: host_budget(int(room / share), share))
    wanted = 4 * asked.num_bytes if expected is None else expected
    assert abs(size.num_blocks * MIB - wanted) <= MIB


def test_a_length_that_may_be_shorter_needs_a_block_all_the_same() -> None:
    asked = replace(need(), may_be_shorter=True, row_bytes=MIB)
    with pytest.raises(ConfigError) as error:
        size_store(asked, settings(kv_cache_memory_bytes=4 * MIB), never)
    assert "one request of max_model_len 1 needs 0.00 GiB" in error.value.message
    advice = f"; raise kv_cache_memory_bytes to {5 * MIB} or lower max_num_seqs"
    assert error.value.message.endswith(advice)
    assert size_store(asked, settings(kv_cache_memory_bytes=5 * MIB), never).num_blocks == 2


def test_a_model_of_states_alone_has_blocks_for_every_row_at_full_length() -> None:
    states = Need(block_bytes=0, groups=KvGroups(16), max_model_len=100, row_bytes=4 * MIB)
    few = settings(max_num_seqs=3, kv_cache_memory_bytes=4 * MIB)
    assert size_store(states, few, never).num_blocks == 1 + 3 * 7
    budget = MemoryBudget(4 * MIB, "cpu_memory_utilization", "")
    assert size_store(states, settings(max_num_seqs=3), lambda: budget).num_blocks == 1 + 3 * 7
    with pytest.raises(ConfigError, match=f"raise kv_cache_memory_bytes to {4 * MIB} or lower"):
        size_store(states, settings(kv_cache_memory_bytes=4 * MIB - 1), never)


@pytest.mark.parametrize(
    ("page_dtype", "factor"),
    [(torch.float8_e4m3fn, 2.0), (torch.float8_e5m2, 2.0), (torch.int8, 2 * 128 / 132)],
    ids=str,
)
def test_pages_of_8_bits_hold_twice_the_tokens_of_16_in_the_same_memory(
    page_dtype: torch.dtype, factor: float
) -> None:
    keeps = ((Pages(2, 128, 128),), (Pages(2, 128, 128, window=16), RECURRENT))
    worker = settings(kv_cache_memory_bytes=8 * MIB, max_num_seqs=4)
    sizes, cpu = [], torch.device("cpu")
    for each in (torch.bfloat16, page_dtype):
        grouping = one_group(keeps)
        asked = need_of(
            keeps, grouping, worker, torch.bfloat16, 64, can_save=False, page_dtype=each
        )
        size = size_store(asked, worker, never)
        shape = (size.num_blocks, worker.block_size, worker.num_rows)
        store = make_store(keeps, *shape, torch.bfloat16, cpu, grouping, page_dtype=each)
        assert 8 * MIB - asked.block_bytes < store.nbytes <= 8 * MIB
        sizes.append(size.num_blocks)
    assert sizes[1] == pytest.approx(factor * sizes[0], abs=2)


PAGES = Pages(2, 16, 16)
WINDOW = Pages(2, 16, 16, window=16)
RECURRENT = State((4, 3), torch.float32)


@pytest.mark.parametrize(
    ("keeps", "block_elements"),
    [
        (((RECURRENT, Latent(16, 8)), (PAGES,)), 24 + 64),
        (((WINDOW,), (WINDOW,), (PAGES,)), 64),
        (((RECURRENT,), (RECURRENT,)), 0),
    ],
    ids=["state, latent and pages", "window groups", "states alone"],
)
def test_what_is_planned_for_is_what_is_made(
    keeps: tuple[LayerKeeps, ...], block_elements: int
) -> None:
    settings = WorkerSettings(max_num_seqs=3, max_num_batched_tokens=64, block_size=16)
    grouping = window_groups(keeps)
    need = need_of(keeps, grouping, settings, torch.bfloat16, 64, can_save=False)
    assert need.block_bytes == 2 * 16 * block_elements
    rows, cpu = settings.num_rows, torch.device("cpu")
    store = make_store(keeps, 5, 16, rows, torch.bfloat16, cpu, grouping)
    assert store.nbytes == 5 * need.block_bytes + need.row_bytes
    assert store.num_blocks == need.size_in(store.nbytes, 5).num_blocks or not block_elements

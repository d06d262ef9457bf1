"""Which decode steps are recorded, and where a worker computes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokenmesh.services.worker_svc.runner.cuda.graphs import Graphs, graph_sizes
from tokenmesh.services.worker_svc.runner.device_choice import device_of
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import ConfigError


@pytest.mark.parametrize(
    ("max_num_seqs", "largest", "sizes"),
    [
        (1, 512, [1]),
        (5, 512, [1, 2, 4, 5]),
        (30, 512, [1, 2, 4, 8, 16, 24, 30]),
        (1024, 20, [1, 2, 4, 8, 16, 20]),
        (256, 0, []),
    ],
)
def test_sizes_end_with_the_lower_bound(max_num_seqs: int, largest: int, sizes: list[int]) -> None:
    assert graph_sizes(max_num_seqs, largest) == sizes


def test_large_sizes_are_16_apart() -> None:
    assert graph_sizes(1024, 512)[-17:] == list(range(256, 513, 16))


@given(max_num_seqs=st.integers(1, 2000), largest=st.integers(1, 600), rows=st.integers(1, 2000))
def test_the_smallest_size_that_holds_the_rows_is_used(
    max_num_seqs: int, largest: int, rows: int
) -> None:
    sizes = graph_sizes(max_num_seqs, largest)
    size = Graphs(sizes).size_for(rows)
    if rows > min(max_num_seqs, largest):
        assert size is None
        return
    assert size is not None
    assert size >= rows
    assert not any(rows <= other < size for other in sizes)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of(WorkerSettings()).type == "cpu"
    with pytest.raises(ConfigError, match="finds no GPU") as caught:
        device_of(WorkerSettings(device="cuda"))
    assert caught.value.param == "worker.device"


def test_a_gpu_is_taken_unless_the_cpu_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert device_of(WorkerSettings()) == torch.device("cuda", 1)
    assert device_of(WorkerSettings(device="cpu")).type == "cpu"

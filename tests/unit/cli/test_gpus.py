"""`up` gives each worker a GPU of its own: by CUDA_VISIBLE_DEVICES, whatever it was before."""

from pathlib import Path
from typing import Any

import pytest

from tokenmesh.cli.embedded import gpus
from tokenmesh.cli.embedded.gpus import overfull, visible_gpus
from tokenmesh.cli.embedded.plan import make_plan
from tokenmesh.shared.config import Settings


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with four GPUs, as its driver shows them."""
    devices = tmp_path / "dev"
    devices.mkdir()
    for name in ("null", "nvidiactl", "nvidia-uvm", "nvidia0", "nvidia1", "nvidia2", "nvidia7"):
        (devices / name).touch()
    monkeypatch.setattr(visible_gpus, "__defaults__", (devices, {}))
    return devices


def settings_of(**sections: Any) -> Settings:
    return Settings.model_validate({"models": [{"model": "a/b"}], **sections})


def placed(settings: Settings, folder: Path) -> dict[str, str | None]:
    """The GPU that each process sees, by its name; None: all of them."""
    folder.mkdir(exist_ok=True)
    services = make_plan(settings, folder).services
    return {each.name: each.environment.get(gpus.VISIBLE) for each in services}


def test_each_worker_and_encoder_has_a_gpu_of_its_own(machine: Path, tmp_path: Path) -> None:
    assert placed(settings_of(up={"workers": 3}), tmp_path / "a") == {
        "scheduler": None,
        "tokenizer": None,
        "encoder": "3",
        "worker 1": "0",
        "worker 2": "1",
        "worker 3": "2",
        "gateway": None,
    }


def test_workers_of_several_models_and_more_than_gpus_take_turns(
    machine: Path, tmp_path: Path
) -> None:
    two = settings_of(models=[{"model": "a/b"}, {"model": "a/c"}], up={"workers": 3})
    found = placed(two, tmp_path / "a")
    assert [found[f"worker {number}"] for number in range(1, 7)] == ["0", "1", "2", "3", "0", "1"]
    assert found["encoder"] == "2"


def test_processes_on_the_cpu_take_no_gpu(machine: Path, tmp_path: Path) -> None:
    on_cpu = settings_of(worker={"device": "cpu"}, up={"workers": 2, "encoders": 2})
    found = placed(on_cpu, tmp_path / "a")
    assert (found["worker 1"], found["worker 2"]) == (None, None)
    assert (found["encoder 1"], found["encoder 2"]) == ("0", "1")


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        ("2,0", ("2", "0")),
        ("GPU-5c, MIG-7a", ("GPU-5c", "MIG-7a")),
        ("1,-1,2", ("1",)),
        ("", ()),
        (None, ("0", "1", "2", "3")),
    ],
)
def test_gpus_are_those_that_cuda_would_see(
    machine: Path, variable: str | None, expected: tuple[str, ...]
) -> None:
    environment = {} if variable is None else {gpus.VISIBLE: variable}
    assert visible_gpus(machine, environment) == expected


def test_with_one_gpu_or_none_nothing_changes(machine: Path, tmp_path: Path) -> None:
    for path in machine.glob("nvidia[127]"):
        path.unlink()
    assert set(placed(settings_of(up={"workers": 2}), tmp_path / "a").values()) == {None}


def test_workers_that_do_not_fit_on_their_gpus_are_announced() -> None:
    settings = settings_of()
    assert overfull(settings, 4, "0123") is None
    assert overfull(settings, 5, "") is None
    text = overfull(settings, 5, "0123")
    assert text is not None
    assert "2 workers share a GPU (of 4)" in text
    assert "--gpu-memory-utilization 0.45" in text
    assert overfull(settings_of(worker={"gpu_memory_utilization": 0.45}), 5, "0123") is None
    assert overfull(settings_of(worker={"device": "cpu"}), 5, "0") is None

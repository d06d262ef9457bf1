"""`tokenmesh serve` runs one service with the settings of all sources."""

import importlib
import sys
from types import ModuleType

import pytest

from tokenmesh.cli.main import run
from tokenmesh.cli.serve import PACKAGES
from tokenmesh.shared.config import Settings


@pytest.mark.parametrize("service", sorted(PACKAGES))
def test_a_service_gets_the_settings_and_its_exit_code_is_returned(
    service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Settings] = []

    def run_service(settings: Settings) -> int:
        given.append(settings)
        return 3

    name = f"tokenmesh.services.{PACKAGES[service]}.main"
    entry = ModuleType(name)
    entry.run = run_service  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, entry)
    monkeypatch.setenv("TOKENMESH_WORKER__MAX_NUM_SEQS", "7")
    assert run(["serve", service, "--nats", "nats://a:1"]) == 3
    assert (given[0].bus.url, given[0].worker.max_num_seqs) == ("nats://a:1", 7)


def test_a_missing_library_is_named_with_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(name: str) -> ModuleType:
        raise ModuleNotFoundError(f"No module named {name}", name="torch")

    monkeypatch.setattr(importlib, "import_module", absent)
    assert run(["serve", "worker"]) == 2
    output = " ".join(capsys.readouterr().err.split())
    assert "the worker needs torch: run `pip install '.[worker,cli]'`" in output

"""`tokenmesh serve` runs one service with the settings of all sources."""

import importlib
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from tokenmesh.cli.main import run
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.up import UpSettings
from tokenmesh.shared.services import SERVICE_BY_NAME, SERVICES, ServiceSpec

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("spec", SERVICES, ids=lambda spec: spec.name)
def test_a_service_of_the_table_has_a_package_a_setting_and_an_extra(spec: ServiceSpec) -> None:
    assert find_spec(spec.module) is not None
    assert spec.count_setting in UpSettings.model_fields
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert spec.name in project["optional-dependencies"]


@pytest.mark.parametrize("service", sorted(SERVICE_BY_NAME))
def test_a_service_gets_the_settings_and_its_exit_code_is_returned(
    service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Settings] = []

    def run_service(settings: Settings) -> int:
        given.append(settings)
        return 3

    name = SERVICE_BY_NAME[service].module
    entry = ModuleType(name)
    entry.run = run_service  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, entry)
    monkeypatch.setenv("TOKENMESH_WORKER__MAX_NUM_SEQS", "7")
    assert run(["serve", service, "--nats", "nats://a:1"]) == 3
    assert (given[0].bus.url, given[0].worker.max_num_seqs) == ("nats://a:1", 7)


@pytest.mark.parametrize("service", ["gateway", "nothing"])
def test_a_service_that_up_starts_loads_no_library_of_the_command_line(
    service: str, tmp_path: Path
) -> None:
    config = tmp_path / "settings.json"
    config.write_text(
        '{"bus": {"url": "nats://127.0.0.1:1"}, "constants": {"bus": {"connect_deadline_s": 0.1}}}'
    )
    code = (
        "import sys; sys.argv[1:] = sys.argv[2:]; from tokenmesh.__main__ import main\n"
        "try: main()\n"
        "except SystemExit as left: print(left.code, 'typer' in sys.modules)\n"
    )
    words = [sys.executable, "-c", code, "-", "serve", service, "--config", str(config)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert ended.stdout.split() == ["2" if service == "nothing" else "3", "False"], ended.stderr
    assert ("tokenmesh up nothing" in ended.stderr) == (service == "nothing")


def test_a_missing_library_is_named_with_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(name: str) -> ModuleType:
        raise ModuleNotFoundError(f"No module named {name}", name="torch")

    monkeypatch.setattr(importlib, "import_module", absent)
    assert run(["serve", "worker"]) == 2
    output = " ".join(capsys.readouterr().err.split())
    assert "the worker needs torch: install tokenmesh-server with its extra `worker`" in output

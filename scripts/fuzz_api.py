"""Lets schemathesis try every route of a mesh with simulated workers.

    python -m scripts.fuzz_api --seconds 1200

Ends with 1 when an answer was a 5xx, came too late, or not at all, or was not as /openapi.json
describes it. `ST202` (a body that fits the schema was refused) is printed and does not count: a
schema cannot say that a prompt must hold a token, or which ids a vocabulary has.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tokenmesh.cli.embedded.ports import free_port
from tokenmesh.shared.parent_death import dies_with_parent

_KEY: Final = "fuzz"
_HOOKS: Final = Path(__file__).with_name("fuzz_hooks.py")
_READY_S: Final = 60.0
_LATE_S: Final = 60
_SHUT_DOWN_S: Final = 120.0
_REFUSED: Final = "positive_data_acceptance"


@contextmanager
def _mesh(port: int, log: Path) -> Iterator[str]:
    """Its address, once it is ready."""
    command = [sys.executable, "-m", "tokenmesh", "up", "tokenmesh-demo"]
    command += [
        "--engine",
        "sim",
        "--port",
        str(port),
        "--api-key",
        _KEY,
        "--enable-tokenizer-info-endpoint",
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, preexec_fn=dies_with_parent()
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_ready(url, process)
        yield url
    finally:
        process.terminate()
        process.wait(_SHUT_DOWN_S)


def _wait_ready(url: str, process: "subprocess.Popen[bytes]") -> None:
    give_up_s = time.monotonic() + _READY_S
    while time.monotonic() < give_up_s and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/readyz", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise SystemExit("the mesh did not start")


def _fuzz(url: str, seconds: int, report: Path) -> None:
    """All checks; what they find is in `report`."""
    command = ["schemathesis", "run", f"{url}/openapi.json", "--checks", "all"]
    command += ["--header", f"Authorization: Bearer {_KEY}", "--continue-on-failure"]
    # making bodies of large schemas is slow on a loaded machine: no reason to leave a route out
    command += ["--suppress-health-check", "all"]
    command += ["--max-time", str(seconds), "--request-timeout", str(_LATE_S)]
    command += ["--max-response-time", str(_LATE_S), "--report-ndjson-path", str(report)]
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": str(_HOOKS)}
    subprocess.run(command, env=environment, timeout=seconds + 300, check=False)


def main() -> int:
    """Run and judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=1200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.ndjson"
        with _mesh(free_port(), Path(folder) / "mesh.log") as url:
            _fuzz(url, options.seconds, report)
        found = failed_checks(report)
    print(f"failed checks: {found or 'none'}")
    return 1 if found.keys() - {_REFUSED} else 0


def failed_checks(report: Path) -> dict[str, int]:
    """Count the failures of each check in a report of schemathesis."""
    counts: dict[str, int] = {}
    for line in report.read_text(encoding="utf-8").splitlines():
        for name in _failed(json.loads(line)):
            counts[name] = counts.get(name, 0) + 1
    return counts


def _failed(value: object) -> Iterator[str]:
    if isinstance(value, list):
        for each in value:
            yield from _failed(each)
    elif isinstance(value, dict):
        if value.get("status") == "failure" and "name" in value:
            yield str(value["name"])
        for each in value.values():
            yield from _failed(each)


if __name__ == "__main__":
    sys.exit(main())

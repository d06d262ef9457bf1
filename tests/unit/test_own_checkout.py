"""Scripts that write files describe and write the checkout that they are in."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path.name for path in (ROOT / "scripts").glob("generate_*.py"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_generator_reads_and_writes_the_checkout_it_is_in(script: str, tmp_path: Path) -> None:
    (tmp_path / "tokenmesh").mkdir()
    (tmp_path / "tokenmesh/__init__.py").write_text("raise SystemExit('another checkout')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, str(ROOT / "scripts" / script), "--check"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")

"""What CI runs, and what it may leave out."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LONG_RUN = re.compile(r"pytest\.mark\.slow|@rounds\(|@counts\(|@some\(")


def kernel_inputs(folder: Path) -> str:
    command = [ROOT / ".ci/kernel_inputs", folder]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("tokenmesh/kernels/op/triton.py", "x = 2\n"),
        ("tokenmesh/kernels/op/new.py", ""),
        ("tests/kernels/test_op.py", "x = 2\n"),
        ("pyproject.toml", '"triton>=3.7"\n'),
        ("Makefile", "pip install 'triton==3.7.*'\n"),
    ],
)
def test_the_kernels_are_tested_again_when_they_change(
    file: str, text: str, tmp_path: Path
) -> None:
    before = {
        "tokenmesh/kernels/op/triton.py": "x = 1\n",
        "tests/kernels/test_op.py": "x = 1\n",
        "pyproject.toml": '"triton>=3.6"\n',
        "Makefile": "pip install 'triton==3.6.*'\n",
    }
    for name, content in before.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    digest = kernel_inputs(tmp_path)
    assert re.fullmatch(r"[0-9a-f]{64}\n", digest)
    (tmp_path / "README.md").write_text("changed")
    assert kernel_inputs(tmp_path) == digest
    (tmp_path / file).write_text(text)
    assert kernel_inputs(tmp_path) != digest


def test_every_file_with_a_long_run_is_listed_for_contributors() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    found = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if LONG_RUN.search(path.read_text("utf-8"))
    ]
    assert "tests/unit/worker_svc/test_engine_schedules.py" in found
    assert [name for name in found if f"`{name}`" not in page] == []
    listed = re.findall(r"^\| `(tests/[\w/]+\.py)`", page, re.M)
    assert [name for name in listed if name not in found] == []

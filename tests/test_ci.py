"""What CI leaves out."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LONG_RUN = re.compile(r"pytest\.mark\.slow|@rounds\(|@counts\(")


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

"""The documentation builds as a site, without a warning, and needs nothing from other hosts."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LOADED = re.compile(
    r"""<(?:script|img|iframe)\b[^>]*\bsrc="(https?:[^"]+)|<link\b[^>]*\brel="(?:stylesheet|preconnect)"[^>]*\bhref="(https?:[^"]+)"""
)
pytestmark = pytest.mark.timeout(90)


def build(out: Path, *, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    """Run the command of `make site`."""
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(out)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        [*command, "--config-file", str(config)], env=environment, capture_output=True, text=True
    )


def test_the_site_has_every_page_and_loads_nothing_from_other_hosts(tmp_path: Path) -> None:
    result = build(tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    written = {page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")}
    expected = {
        page.parent / "index.html"
        if page.name == "README.md"
        else page.with_suffix("") / "index.html"
        for page in written
    }
    built = {page.relative_to(tmp_path) for page in tmp_path.rglob("*.html")}
    assert expected <= built
    assert Path("repository/CONTRIBUTING/index.html") in built
    hosts = {each for page in tmp_path.rglob("*.html") for each in LOADED.findall(page.read_text())}
    assert hosts == set()

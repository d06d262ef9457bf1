"""Write generated files, or compare them with what they should be."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def write_or_check(description: str | None, files: Mapping[Path, str]) -> int:
    """The command line of a generator: with --check nothing is written; 1 when a file is stale."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="write nothing, fail when stale")
    check = parser.parse_args().check
    stale = [
        path
        for path, text in files.items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    for path in stale:
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files[path], encoding="utf-8")
        print(f"{'stale, run `make docs`' if check else 'written'}: {path.relative_to(ROOT)}")
    return int(check and bool(stale))

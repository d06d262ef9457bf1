"""The pages of the documentation, and what they set as code."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent.parent
NOTEBOOK: Final = ROOT / "docs/log.md"
"""Says what was true on its day: not a page that is checked."""
PAGES: Final = sorted(
    {
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "tokenmesh").rglob("README.md"),
        *ROOT.glob("*.md"),
        *(ROOT / folder / "README.md" for folder in ("compose", "benchmarks")),
    }
    - {NOTEBOOK}
)

_SPAN: Final = re.compile(r"`([^`\n]+)`")
_FENCE: Final = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_HEADING: Final = re.compile(r"^#+ (.+)$", re.MULTILINE)


def name_of(page: Path) -> str:
    """Relative to the repository."""
    return str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def spans(page: Path) -> list[str]:
    """What stands in backticks outside of code blocks."""
    return _SPAN.findall(prose(page))


def blocks(page: Path, *languages: str) -> Iterator[str]:
    """Code blocks of these languages; "" are those that name none."""
    for language, text in _FENCE.findall(page.read_text(encoding="utf-8")):
        if language in languages:
            yield text


def commands(page: Path) -> Iterator[str]:
    """Lines of a shell, those that go on after a backslash as one."""
    for block in blocks(page, "", "sh", "bash"):
        yield from block.replace("\\\n", " ").splitlines()


def anchors(page: Path) -> set[str]:
    """Of the headings, as the usual viewers make them."""
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        for heading in _HEADING.findall(prose(page))
    }


def rows(page: Path, heading: str) -> list[list[str]]:
    """Cells of the table rows below a heading, up to the next one of its level."""
    level = heading.split()[0]
    text = page.read_text(encoding="utf-8").partition(f"\n{heading}\n")[2]
    text = re.split(rf"\n#{{1,{len(level)}}} ", text)[0]
    found = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line[:2] == "| "]
    return [[cell.strip() for cell in row] for row in found]

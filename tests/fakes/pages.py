"""The pages of the documentation, and what they set as code."""

import re
from collections.abc import Callable, Iterator, Sequence
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


def each_of(pages: Sequence[Path]) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """Make one test of a check of a page: it fails with the names of all pages that fail."""

    def decorate(check: Callable[[Path], None]) -> Callable[[], None]:
        def test() -> None:
            failed: list[Exception] = []
            for page in pages:
                try:
                    check(page)
                except Exception as error:
                    error.add_note(f"in {page.relative_to(ROOT)}")
                    failed.append(error)
            if failed:
                raise ExceptionGroup("pages of the documentation", failed)

        test.__doc__ = check.__doc__
        return test

    return decorate


on_every_page: Final = each_of(PAGES)


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def spans(page: Path) -> list[str]:
    """Return the texts in backticks outside of code blocks."""
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
    """Return the anchors of the headings, as the usual viewers make them."""
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

"""MarkdownStream: Markdown on a terminal while it is still being made."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown

_FENCES: Final = ("```", "~~~")


class MarkdownStream:
    """Prints a block once it is complete; the unfinished last block is drawn again as it grows."""

    def __init__(self, console: Console, style: str = "") -> None:
        self._console = console
        self._style = style
        self._tail = ""
        self._live = Live(
            console=console, auto_refresh=False, transient=True, vertical_overflow="ellipsis"
        )

    def feed(self, text: str) -> None:
        with _uninterrupted():
            self._tail += text
            complete, self._tail = split_blocks(self._tail)
            if complete:
                self._print(complete)
            if self._tail.strip():
                if not self._live.is_started:
                    self._live.start()
                self._live.update(self._drawn(self._tail), refresh=True)

    def end(self) -> None:
        """Print what is left; the stream may be used again."""
        with _uninterrupted():
            if self._tail.strip():
                self._print(self._tail)
            self._live.stop()
            self._tail = ""

    def _print(self, text: str) -> None:
        # the live block goes first: what is printed now takes its place
        self._live.stop()
        self._console.print(self._drawn(text))

    def _drawn(self, text: str) -> Markdown:
        return Markdown(text, style=self._style or "none", code_theme="ansi_dark")


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let Ctrl-C wait until the terminal shows what rich believes that it shows.

    Otherwise a part that is drawn twice would stay.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def split_blocks(text: str) -> tuple[str, str]:
    """Text up to the last empty line outside of fenced code, and the rest."""
    border = position = 0
    fence = ""
    for line in text.splitlines(keepends=True):
        position += len(line)
        mark = line.lstrip()[:3]
        if fence:
            fence = "" if mark == fence else fence
        elif mark in _FENCES:
            fence = mark
        elif line == "\n":
            border = position
    return text[:border], text[border:]

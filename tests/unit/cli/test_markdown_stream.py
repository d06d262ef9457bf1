"""Markdown is printed block by block, whatever pieces it arrives in."""

import io
import signal
from collections.abc import Iterator

import pytest
from rich.console import Console
from rich.markdown import Markdown

from tokenmesh.cli.markdown import MarkdownStream, split_blocks

TEXT = "# Title\n\nSome **bold** text.\n\n```python\na = 1\n\nb = 2\n```\n\n- one\n- two\n"


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_the_printed_text_does_not_depend_on_the_pieces(size: int) -> None:
    console = Console(file=io.StringIO(), width=60, force_terminal=False)
    with console.capture() as captured:
        stream = MarkdownStream(console)
        for begin in range(0, len(TEXT), size):
            stream.feed(TEXT[begin : begin + size])
        stream.end()
    shown = captured.get()
    for part in ("Title", "Some bold text.", "a = 1", "b = 2", "\u2022 one"):
        assert shown.count(part) == 1, shown
    assert "**" not in shown
    assert "```" not in shown


def test_blocks_end_at_empty_lines_but_not_within_code() -> None:
    assert split_blocks("a\n\nb") == ("a\n\n", "b")
    assert split_blocks("```\na\n\nb\n") == ("", "```\na\n\nb\n")
    assert split_blocks("```\na\n\n```\n\nx") == ("```\na\n\n```\n\n", "x")
    assert split_blocks("~~~\n```\n\n") == ("", "~~~\n```\n\n")
    assert split_blocks("") == ("", "")


@pytest.fixture
def handled_sigint() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt: a process that a shell starts with `&` ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("handled_sigint")
def test_ctrl_c_while_text_is_drawn_does_not_draw_it_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "many words that need two rows"

    def printed(*, is_interrupted: bool) -> str:
        console = Console(file=io.StringIO(), width=20, force_terminal=True)
        stream = MarkdownStream(console)
        stream.feed(text[:25])
        with monkeypatch.context() as patch, console.capture() as captured:
            draw = stream._drawn

            def drawn(part: str) -> Markdown:
                if is_interrupted:
                    signal.raise_signal(signal.SIGINT)
                return draw(part)

            patch.setattr(stream, "_drawn", drawn)
            if is_interrupted:
                with pytest.raises(KeyboardInterrupt):
                    stream.feed(text[25:])
            else:
                stream.feed(text[25:])
            patch.undo()
            stream.end()
        return captured.get()

    assert printed(is_interrupted=True) == printed(is_interrupted=False)

"""Streamed text is broken between words, regardless of the pieces it comes in."""

import pytest
from rich.cells import cell_len

from tokenmesh.cli.chat import WordWrap

STORY = "Once upon a time a small token lived in a mesh. It knocked at the gateway.\n\nThe  end."


def wrapped(text: str, width: int | None, size: int = 1) -> str:
    wrap = WordWrap(width)
    pieces = [text[begin : begin + size] for begin in range(0, len(text), size)]
    return "".join(map(wrap.feed, pieces)) + wrap.rest()


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("width", [10, 20, 33])
def test_no_word_is_cut_and_no_line_too_long(width: int, size: int) -> None:
    text = wrapped(STORY, width, size)
    assert max(map(cell_len, text.splitlines())) <= width
    assert text.split() == STORY.split()
    assert "gateway.\n\nThe  end." in text


def test_a_word_is_written_as_soon_as_it_is_complete() -> None:
    wrap = WordWrap(40)
    assert [wrap.feed(piece) for piece in ("Hel", "lo", " wo", "rld", "\n")] == [
        "", "", "Hello", "", " world\n",
    ]  # fmt: skip


def test_a_word_longer_than_the_line_is_not_held_back() -> None:
    text = wrapped("see " + "x" * 25 + " end", 10)
    assert text.replace("\n", "").replace(" ", "") == "see" + "x" * 25 + "end"
    assert max(map(cell_len, text.splitlines())) <= 10


def test_text_without_spaces_is_written_character_by_character() -> None:
    wrap = WordWrap(10)
    assert [wrap.feed(char) for char in "一二三"] == ["一", "二", "三"]
    assert max(map(cell_len, wrapped("一二三四五六七八", 10).splitlines())) == 10


def test_code_between_fences_stays_as_it_is() -> None:
    code = "```python\nprint('a line that is longer than the terminal')\n```\n"
    assert wrapped(code, 20) == code
    assert "\n" in wrapped(code + "after the code words wrap again", 20).removeprefix(code)


def test_without_a_terminal_nothing_changes() -> None:
    assert wrapped(STORY * 3, None, 7) == STORY * 3

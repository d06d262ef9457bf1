"""The time of a parser grows with the text and not faster, whatever it is in the middle of."""

import time

import pytest

from tests.unit.gateway.parsers.tool_formats import deepseek_token, maker

LENGTH = 10_000

CASES = [
    ("hermes", "", "word "),
    ("hermes", "", "\n"),
    ("hermes", "", "<"),
    ("hermes", "", "<tool_call>"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "', "word "),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "', '\\"'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [', "1, "),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ', "["),
    ("hermes", '<tool_call>{"arguments": {"a": "', "word "),
    ("hermes", '<tool_call>{"arguments": "', '{\\"a\\"'),
    ("hermes", '<tool_call>{"name": "', "word "),
    ("hermes", '<tool_call>{"name": "f", "id": 1', " "),
    ("hermes", "<tool_call>", '{"name": "f"}, '),
    ("jamba", "<tool_calls>[", '{"x": 1}, '),
    ("mistral", "[TOOL_CALLS]", "name"),
    ("mistral", "", "[TOOL_CALLS]f[ARGS]{}"),
    ("kimi_k2", "<|tool_call_begin|>", "word"),
    ("deepseek_v31", f"{deepseek_token('tool call begin')}f{deepseek_token('tool sep')}", "x"),
    ("qwen3_coder", "<function=f><parameter=a>", "word "),
    ("qwen3_coder", "<function=f><parameter=a>", "\n"),
    ("qwen3_coder", "<function=get_weather><parameter=where>", "[1, "),
    ("qwen3_coder", "<function=f>", "<parameter=a>1</parameter>"),
    ("qwen3_coder", "<function=", "x"),
    ("step3", '<steptml:invoke name="f"><steptml:parameter name="a">', " "),
    ("glm45", "<tool_call>f<arg_key>", "x"),
    ("glm45", "<tool_call>", "x"),
    ("pythonic", "[f(a=", "word "),
    ("pythonic", "[f(a='", "\\n"),
    ("pythonic", "[", "f(a=1), "),
    ("pythonic", "[f(a=[", "1, "),
]


def _seconds(family: str, start: str, piece: str, length: int, portion: int) -> float:
    text = start + piece * (length // len(piece))
    parser = maker(family)()
    begin = time.process_time()
    for place in range(0, len(text), portion):
        parser.push(text[place : place + portion])
    parser.finish()
    return time.process_time() - begin


COPIED = [
    ("hermes", "", "\n"),
    ("hermes", '<tool_call>{"arguments": {"a": "', "word "),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "', "word "),
    ("step3", '<steptml:invoke name="f"><steptml:parameter name="a">', " "),
    ("kimi_k2", "<|tool_call_begin|>", "word"),
]
"""Formats in which a text is kept meanwhile: copying it each time shows in long texts only."""


def _grows_slowly(
    family: str, start: str, piece: str, portion: int, factor: int, length: int = LENGTH
) -> bool:
    """Quadratic time would be `factor` squared; a fixed part hides what is too short."""
    short = _seconds(family, start, piece, length, portion)
    return _seconds(family, start, piece, length * factor, portion) < 3 * factor * short + 0.01


@pytest.mark.parametrize(("family", "start", "piece"), CASES)
@pytest.mark.parametrize("portion", [4, 1_000_000])
def test_time_grows_no_faster_than_the_text(
    family: str, start: str, piece: str, portion: int
) -> None:
    # Other processes can make one measurement long, not three.
    assert any(_grows_slowly(family, start, piece, portion, 8) for _ in range(3))


@pytest.mark.parametrize(("family", "start", "piece"), COPIED)
def test_kept_text_is_not_copied_for_each_chunk(family: str, start: str, piece: str) -> None:
    assert any(_grows_slowly(family, start, piece, 4, 40, 20_000) for _ in range(3))


def test_an_argument_of_a_hundred_kilobytes_takes_little_time() -> None:
    seconds = _seconds("hermes", '<tool_call>{"name": "f", "arguments": {"a": "', "x", 100_000, 4)
    assert seconds / 25_000 < 50e-6

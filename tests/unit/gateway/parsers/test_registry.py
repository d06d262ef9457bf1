"""Formats are found by name; an unknown name fails with the list of known ones."""

import re
from pathlib import Path

import pytest

from tokenmesh.services.gateway.parsers.parser import ParseContext
from tokenmesh.services.gateway.parsers.reasoning import REASONING, block_format
from tokenmesh.services.gateway.parsers.registry import TOOLS, ParserRegistry
from tokenmesh.shared.errors import ConfigError
from tokenmesh.shared.parser_names import names_in

HERE = "tests.unit.gateway.parsers.test_registry"
OWN = block_format(("<deep>",), ("</deep>",))
NO_FORMAT = "text"


def test_the_documentation_names_every_parser() -> None:
    page = (Path(__file__).resolve().parents[4] / "docs/http-api.md").read_text("utf-8")
    words = set(re.findall(r"[\w-]+", page[page.index("## Parsers") :]))
    assert {*REASONING, *TOOLS} <= words


@pytest.mark.parametrize("name", sorted(REASONING))
def test_every_reasoning_format_can_be_made(name: str) -> None:
    family = ParserRegistry().family(name, "")
    assert family.make(ParseContext()) is not None
    assert all(family.reasoning_ends)
    assert family.reasoning_ends


@pytest.mark.parametrize("name", sorted(TOOLS))
def test_every_tool_format_can_be_made(name: str) -> None:
    assert ParserRegistry().family("", name).make(ParseContext()) is not None


def test_constraints_begin_after_any_end_of_reasoning() -> None:
    def ends(name: str) -> tuple[str, ...]:
        return ParserRegistry().family(name, "").reasoning_ends

    assert ends("qwen3") == ends("step3p5") == ("</think>",)
    assert ends("granite") == ("Here is my response:", "Here's my response:")
    assert "<|channel|>final <|constrain|>json<|message|>" in ends("openai_gptoss")
    assert ParserRegistry().family("", "hermes").reasoning_ends == ()


def test_no_names_make_no_parser() -> None:
    family = ParserRegistry().family("", "")
    assert family.make(ParseContext()) is None
    assert not family.begins_reasoning(ParseContext())


def test_an_unknown_name_fails_with_the_known_names() -> None:
    with pytest.raises(ConfigError, match=r"unknown parser 'qwen9'.*deepseek_r1.*qwen3") as caught:
        ParserRegistry().family("qwen9", "")
    assert caught.value.param == "reasoning_parser"


def test_a_plugin_is_found_by_its_name() -> None:
    registry = ParserRegistry({"deep": f"{HERE}:OWN"})
    assert registry.family("deep", "").reasoning is not None
    with pytest.raises(ConfigError):
        ParserRegistry().family("deep", "")


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("deep", "no.such.module:OWN"),
        ("deep", f"{HERE}:NO_SUCH"),
        ("deep", f"{HERE}:NO_FORMAT"),
        ("deep", "nothing"),
        ("qwen3", f"{HERE}:OWN"),
    ],
)
def test_an_invalid_plugin_is_reported_by_name(name: str, address: str) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        ParserRegistry({name: address})
    assert caught.value.param == "parser_plugins"


FILE = """
from tokenmesh.services.gateway.parsers.reasoning import block_format

PARSERS = {"deep": block_format(("<deep>",), ("</deep>",))}
"""


def test_a_file_brings_parsers_by_the_names_that_it_writes(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(FILE)
    assert names_in(str(path)) == ("deep",)
    family = ParserRegistry(files=[str(path)]).family("deep", "")
    assert family.reasoning_ends == ("</deep>",)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x = 1", "holds no parser; it must define PARSERS"),
        ("PARSERS = dict(deep=1)", "holds no parser; it must define PARSERS"),
        ("import no_such_module\nPARSERS = {'deep': 1}", "cannot be imported"),
        ("PARSERS = {'deep': 1}", "deep is neither a ReasoningFormat nor a ToolFormat"),
        ("PARSERS = {", "it must define PARSERS"),
        (FILE.replace("deep", "qwen3"), "'qwen3' is the name of a built-in parser"),
        (None, "No such file"),
    ],
)
def test_a_file_without_parsers_is_refused_with_what_it_must_hold(
    tmp_path: Path, text: str | None, problem: str
) -> None:
    path = tmp_path / "own.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=problem) as caught:
        ParserRegistry(files=[str(path)])
    assert caught.value.param == "parser_files"


def test_what_a_spent_budget_writes_ends_reasoning() -> None:
    def cuts(end: str) -> tuple[str, ...]:
        return ParserRegistry().family("qwen3", "", end).cuts

    assert cuts("") == ("</think>",)
    assert cuts("Enough.</think>\n") == ("Enough.</think>\n", "</think>")
    assert cuts("Enough.") == ("Enough.</think>", "</think>")
    assert ParserRegistry().family("", "hermes", "x").cuts == ()

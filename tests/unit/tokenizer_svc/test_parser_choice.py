"""A model's parsers: what the operator says, or what its chat template shows."""

from importlib.resources import files

import pytest

from tests.fakes import chat_templates
from tokenmesh.services.tokenizer_svc.parser_choice import ParserNames, choose_parsers
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.errors import ConfigError
from tokenmesh.shared.parser_names import REASONING_PARSERS, TOOL_PARSERS

DEMO = (files("tokenmesh.demo_model") / "chat_template.jinja").read_text(encoding="utf-8")


def choose(template: str, reasoning: str = "auto", tools: str = "auto") -> ParserNames:
    settings = ModelSettings(model="m", reasoning_parser=reasoning, tool_call_parser=tools)
    return choose_parsers(settings, [template])


@pytest.mark.parametrize(
    ("template", "reasoning", "tools"),
    [
        (DEMO, "deepseek_v3", "hermes"),
        (chat_templates.CHATML, "qwen3", "hermes"),
        (chat_templates.DEEPSEEK, "qwen3", ""),
        (chat_templates.LLAMA3, "", "llama3_json"),
        (chat_templates.MISTRAL, "", ""),
        (chat_templates.DOCUMENTS, "", ""),
        (chat_templates.PARTS, "", ""),
    ],
)
def test_a_template_shows_its_models_markers(template: str, reasoning: str, tools: str) -> None:
    names = choose(template)
    assert names.reasoning == (reasoning if reasoning in REASONING_PARSERS else "")
    assert names.tools == (tools if tools in TOOL_PARSERS else "")


def test_every_template_of_a_model_counts() -> None:
    settings = ModelSettings(model="m")
    names = choose_parsers(settings, [chat_templates.PARTS, chat_templates.CHATML])
    assert names.reasoning == "qwen3"


def test_the_operators_word_counts_before_the_template() -> None:
    assert choose(chat_templates.CHATML, reasoning="deepseek_r1").reasoning == "deepseek_r1"
    assert choose(chat_templates.CHATML, reasoning="none", tools="none") == ParserNames()


def test_a_name_that_nobody_knows_is_told_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"qwen9.*deepseek_r1.*qwen3") as caught:
        choose("", reasoning="qwen9")
    assert caught.value.param == "reasoning_parser"
    with pytest.raises(ConfigError, match="qwen3"):
        choose("", tools="qwen3")


def test_a_plugins_name_is_known() -> None:
    settings = ModelSettings(model="m", reasoning_parser="deep")
    assert choose_parsers(settings, [], {"deep"}).reasoning == "deep"

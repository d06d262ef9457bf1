"""A model's parsers: what the operator says, or what its chat template shows."""

from importlib.resources import files

import pytest

from tests.fakes import chat_templates
from tokenmesh.services.tokenizer_svc import parser_choice
from tokenmesh.services.tokenizer_svc.parser_choice import ParserNames, choose_parsers
from tokenmesh.shared.built_in_parsers import REASONING_PARSERS, TOOL_PARSERS
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.errors import ConfigError

DEMO = (files("tokenmesh.demo_model") / "chat_template.jinja").read_text(encoding="utf-8")


def choose(template: str, reasoning: str = "auto", tools: str = "auto") -> ParserNames:
    settings = ModelSettings(model="m", reasoning_parser=reasoning, tool_call_parser=tools)
    return choose_parsers(settings, [template])


THINK = "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
V3_CALLS = "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>function"
SAMPLES = {
    "gpt-oss": (
        "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}"
        "{{ '<|start|>assistant<|channel|>commentary to=functions.' + call.name }}",
        *("openai_gptoss", "openai"),
    ),
    "Qwen3-Coder": ("{{ '<tool_call>\\n<function=' + call.name + '>' }}", "", "qwen3_coder"),
    "Qwen3.5": (
        THINK + "{{ '<tool_call>\\n<function=' + call.name + '>' }}"
        "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>"
        "{% else %}<think>{% endif %}",
        *("qwen3", "qwen3_coder"),
    ),
    "DeepSeek-R1": (
        THINK + "{{'<\uff5cAssistant\uff5c>" + V3_CALLS + "```json' }}"
        "{{'<\uff5cAssistant\uff5c><think>\\n'}}",
        *("deepseek_r1", "deepseek_v3"),
    ),
    "DeepSeek-V3.1": (
        THINK + "{% if not thinking is defined %}{% set thinking = false %}{% endif %}"
        "{{'<\uff5cAssistant\uff5c>" + V3_CALLS + "'}}",
        *("deepseek_v3", "deepseek_v31"),
    ),
    "DeepSeek-V3-0324": (
        "{{'<\uff5cAssistant\uff5c>" + V3_CALLS + "```json' }}",
        *("", "deepseek_v3"),
    ),
    "DeepSeek-V3.2": (
        "{% set dsml = '\uff5cDSML\uff5c' %}<{{ dsml }}function_calls>"
        "{{ '<\uff5cAssistant\uff5c></think>' }}",
        *("deepseek_v4", "deepseek_v32"),
    ),
    "DeepSeek-V4": (
        "{% set dsml = '\uff5cDSML\uff5c' %}<{{ dsml }}tool_calls>"
        "{% for call in message.tool_calls %}{{ '<\uff5cAssistant\uff5c></think>' }}",
        *("deepseek_v4", "deepseek_v4"),
    ),
    "GLM-4.5": (THINK + "<tool_call>{name}\n<arg_key>{key}</arg_key>", "glm45", "glm45"),
    "Kimi-K2-Thinking": (
        "<think>{{ rc }}</think><|tool_calls_section_begin|><|tool_call_begin|>",
        *("kimi_k2", "kimi_k2"),
    ),
    "Kimi-K2-Instruct": ("<|tool_calls_section_begin|><|tool_call_begin|>", "", "kimi_k2"),
    "MiniMax-M2": (
        THINK + "{% set begin = '<minimax:tool_call>' %}{{ '\\n<response>' + m.content }}",
        *("minimax_m2", "minimax_m2"),
    ),
    "Magistral": ("[THINK]{{ m.reasoning }}[/THINK][TOOL_CALLS]", "mistral", "mistral"),
    "Mistral-Small": ("{{ '[TOOL_CALLS]' + call.name }}", "", "mistral"),
    "Granite-3.2": (
        "Write your thoughts after 'Here is my thought process:' and your response after "
        "'Here is my response:'. {{ '<|start_of_role|>assistant_tool_call<|tool_call|>' }}",
        *("granite", "granite"),
    ),
    "Granite-4": ("<|start_of_role|>assistant<tool_call>", "", "hermes"),
    "Phi-4-mini": ("{{ '<|tool|>' + m.tools + '<|/tool|>' }}", "", "phi4_mini_json"),
    "Seed-OSS": (
        "{% set think = '<seed:think>' %}<seed:tool_call>\n<function=f>",
        *("seed_oss", "seed_oss"),
    ),
    "Hunyuan-A13B": (
        "{{ content + '<|extra_0|>' }}<tool_calls>[{}]</tool_calls><think>\n\n</think>\n",
        *("hunyuan_a13b", "hunyuan_a13b"),
    ),
    "ERNIE-4.5-Thinking": (THINK + "<response>\n<tool_call>", "ernie45", "hermes"),
    "Jamba-1.5": ("{{ '<tool_calls>' }}[", "", "jamba"),
    "Olmo-3": (THINK + "<function_calls>f(a='b')</function_calls>", "qwen3", "olmo3"),
    "Llama-4": ("<|header_start|>{% if 'tool_calls' in message %}", "", "llama4_pythonic"),
    "off unless asked for": (
        "{% if thinking is defined and thinking %}<think>{% else %}<think></think>{% endif %}",
        *("deepseek_v3", ""),
    ),
    "on unless set otherwise": (
        "{% if thinking is defined and thinking is false %}<think></think>{% endif %}",
        *("qwen3", ""),
    ),
    "Gemma-4": (
        "{% if not enable_thinking | default(false) %}<|channel>thought\n<channel|>{% endif %}",
        *("gemma4", ""),
    ),
    "Gemma-4 with tools": (
        "{% if not enable_thinking | default(false) %}<|channel>thought\n<channel|>{% endif %}"
        "{{ '<|tool_call>call:' + call.name + '{' }}{{ '}<tool_call|>' }}",
        *("gemma4", "gemma4"),
    ),
    "FunctionGemma": (
        "{{ '<start_function_call>call:' + call.name + '{' }}{{ '}<end_function_call>' }}"
        "{{ '<start_of_turn>model\n' }}",
        *("", "functiongemma"),
    ),
    "Apertus": ("{% set begin = '<|tools_prefix|>' %}{{ begin + '[' }}", "", "apertus"),
    "GigaChat-3": (
        "{{ show({'role': 'function call', 'content': call}) }}"
        "{% set seps = namespace(role='<|role_sep|>\n') %}",
        *("", "gigachat3"),
    ),
    "GigaChat-3.5, which writes calls in another way": (
        "{% set seps = namespace(role='<|role_sep|>\n') %}"
        "{% if message['role'] == 'function call' %}{{ show_calls(message) }}",
        *("", ""),
    ),
    "GigaChat-3.1": ("{{ '<|function_call|>' + call | tojson }}", "", "gigachat3"),
    "Gemma-2": ("<start_of_turn>model\n", "", ""),
}


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
        *SAMPLES.values(),
    ],
    ids=["demo", "chatml", "deepseek", "llama3", "mistral", "documents", "parts", *SAMPLES],
)
def test_a_template_shows_its_models_markers(template: str, reasoning: str, tools: str) -> None:
    assert choose(template) == ParserNames(reasoning, tools, are_detected=True)


def test_detected_parsers_have_known_names() -> None:
    assert {name for name, _ in parser_choice._REASONING_SIGNS} <= set(REASONING_PARSERS)
    assert {name for name, _ in parser_choice._TOOL_SIGNS} <= set(TOOL_PARSERS)


def test_every_template_of_a_model_counts() -> None:
    settings = ModelSettings(model="m")
    names = choose_parsers(settings, [chat_templates.PARTS, chat_templates.CHATML])
    assert names.reasoning == "qwen3"


def test_the_operators_word_counts_before_the_template() -> None:
    assert choose(chat_templates.CHATML, reasoning="deepseek_r1").reasoning == "deepseek_r1"
    assert choose(chat_templates.CHATML, reasoning="none", tools="none") == ParserNames(
        are_detected=True
    )


def test_an_unknown_parser_is_refused_with_the_known_names() -> None:
    with pytest.raises(ConfigError, match=r"qwen9.*deepseek_r1.*qwen3") as caught:
        choose("", reasoning="qwen9")
    assert caught.value.param == "reasoning_parser"
    with pytest.raises(ConfigError, match="qwen3"):
        choose("", tools="qwen3")


def test_a_plugins_name_is_known() -> None:
    settings = ModelSettings(model="m", reasoning_parser="deep")
    assert choose_parsers(settings, [], {"deep"}).reasoning == "deep"

"""Chooses the parsers of a model: the configured ones, or those that its chat templates show.

A template writes earlier turns in the model's format, so it holds the model's markers.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from tokenmesh.shared.built_in_parsers import REASONING_PARSERS, TOOL_PARSERS
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.errors import ConfigError

_AUTO: Final = "auto"
_NONE: Final = "none"

_Signs = Sequence[tuple[str, tuple[str, ...]]]

_OFF_BY_DEFAULT: Final = (
    "enable_thinking is defined and enable_thinking %}",
    "enable_thinking is defined and enable_thinking -%}",
    "enable_thinking is defined and enable_thinking is true",
    "enable_thinking | default(false)",
    "if thinking is defined and thinking %}",
    "if thinking is defined and thinking -%}",
)
"""With these switches in a template the model thinks only if a request enables it."""

_REASONING_SIGNS: Final[_Signs] = (
    ("openai_gptoss", ("<|channel|>", "analysis")),
    ("gemma4", ("<|channel>",)),
    ("seed_oss", ("<seed:think>",)),
    ("mistral", ("[THINK]",)),
    ("cohere_command4", ("<|START_THINKING|>", "<|START_TEXT|>")),
    ("cohere_command3", ("<|START_THINKING|>",)),
    ("granite", ("Here is my thought process:",)),
    ("minimax_m2", ("<minimax:tool_call>", "</think>")),
    ("minimax_m3", ("</mm:think>",)),
    ("hunyuan_a13b", ("<|extra_0|>", "</think>")),
    ("ernie45", ("<response>", "</think>")),
    ("kimi_k2", ("<|tool_calls_section_begin|>", "</think>")),
    ("glm45", ("<arg_key>", "</think>")),
    ("deepseek_v4", ("\uff5cDSML\uff5c", "</think>")),
    ("deepseek_v3", ("<\uff5cAssistant\uff5c>", "</think>", "thinking")),
    ("deepseek_r1", ("<\uff5cAssistant\uff5c>", "</think>")),
    *(("deepseek_v3", (switch, "</think>")) for switch in _OFF_BY_DEFAULT),
    ("qwen3", ("</think>",)),
)
"""A name, and texts that must all be in the template; the first match counts."""

_TOOL_SIGNS: Final[_Signs] = (
    ("openai", ("<|channel|>", "commentary")),
    ("seed_oss", ("<seed:tool_call>",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("deepseek_v4", ("\uff5cDSML\uff5c", "tool_calls>")),
    ("deepseek_v32", ("\uff5cDSML\uff5c",)),
    ("longcat", ("<longcat_tool_call>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("gemma4", ("<|tool_call>",)),
    ("functiongemma", ("<start_function_call>",)),
    ("apertus", ("<|tools_prefix|>",)),
    ("gigachat3", ("<|function_call|>",)),
    ("gigachat3", ("<|role_sep|>", "'role': 'function call'")),
    ("dots", ("<dots_function_call>",)),
    ("cohere_command3", ("<|START_ACTION|>",)),
    ("deepseek_v3", ("<\uff5ctool\u2581calls\u2581begin\uff5c>", "```json")),
    ("deepseek_v31", ("<\uff5ctool\u2581calls\u2581begin\uff5c>",)),
    ("glm45", ("<arg_key>",)),
    ("step3", ("<steptml:",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("granite", ("<|start_of_role|>", "<|tool_call|>")),
    ("granite-20b-fc", ("<|function_call_library|>",)),
    ("phi4_mini_json", ("functools[",)),
    ("phi4_mini_json", ("<|tool|>",)),
    ("internlm", ("<|action_start|>",)),
    ("olmo3", ("<function_calls>",)),
    ("llama4_pythonic", ("<|header_start|>", "tool_calls")),
    ("llama3_json", ("<|start_header_id|>", "tool_calls", '"parameters": ')),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("hermes", ("<tool_call>",)),
    ("hunyuan_a13b", ("<tool_calls>", "<|extra_0|>")),
    ("jamba", ("<tool_calls>",)),
)


@dataclass(frozen=True, slots=True)
class ParserNames:
    """The parsers of one model; an empty name means none."""

    reasoning: str = ""
    tools: str = ""
    reasoning_end: str = ""
    """See `Described.reasoning_end`."""
    are_detected: bool = False
    """True where the settings name none."""


def choose_parsers(
    settings: ModelSettings, templates: Iterable[str], plugins: Collection[str] = ()
) -> ParserNames:
    """Choose among the built-in names and `plugins`. Raises ConfigError for another one."""
    text = "\n".join(templates)
    return ParserNames(
        reasoning=_choose(
            "reasoning_parser",
            settings.reasoning_parser,
            {*REASONING_PARSERS, *plugins},
            _detect(text, _REASONING_SIGNS),
        ),
        tools=_choose(
            "tool_call_parser",
            settings.tool_call_parser,
            {*TOOL_PARSERS, *plugins},
            _detect(text, _TOOL_SIGNS),
        ),
        reasoning_end=settings.reasoning_end_str,
        are_detected={settings.reasoning_parser, settings.tool_call_parser} <= {_AUTO, _NONE},
    )


def _choose(setting: str, wanted: str, known: Collection[str], detected: str) -> str:
    if wanted == _AUTO:
        return detected
    if wanted == _NONE:
        return ""
    if wanted not in known:
        raise ConfigError(
            f"{setting} = {wanted!r}: must be {_AUTO}, {_NONE}, a name of "
            f"gateway.parser_plugins or parser_files, or one of {', '.join(sorted(known))}",
            param=setting,
        )
    return wanted


def _detect(template: str, signs: _Signs) -> str:
    for name, markers in signs:
        if all(marker in template for marker in markers):
            return name
    return ""

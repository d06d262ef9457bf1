"""The formats whose calls are tags around bare values, as data."""

import re
from typing import Final

from tokenmesh.services.gateway.parsers.formats import ToolFormat
from tokenmesh.services.gateway.parsers.tools.markup import MarkupFormat, markup_script
from tokenmesh.services.gateway.parsers.tools.script_parser import tool_format
from tokenmesh.services.gateway.parsers.tools.typed_arguments import Trim

_BAR: Final = "\N{FULLWIDTH VERTICAL LINE}"
_NAME: Final = re.compile(r"""\s*+["']?+(\s*+[^"'<>\s]++(?:\s++[^"'<>\s]++)*)["']?\s*""")
_DSML_NAME: Final = re.compile(r"""\s+name="([^"]+)"(?:\s+string="(true|false)")?\s*""")


def _markup(markup: MarkupFormat) -> ToolFormat:
    return tool_format(markup_script(markup))


def _qwen_like(prefix: str, trim: Trim = Trim.NEWLINE) -> ToolFormat:
    return _markup(
        MarkupFormat(
            call="<function=",
            call_end="</function>",
            parameter="<parameter=",
            parameter_end="</parameter>",
            attributes=_NAME,
            sections=(f"<{prefix}tool_call>",),
            section_ends=(f"</{prefix}tool_call>",),
            trim=trim,
        )
    )


QWEN3_CODER: Final = _qwen_like("")
"""Also Step 3.5 and what vLLM calls qwen3_xml."""

SEED_OSS: Final = _qwen_like("seed:")

MIMO: Final = _qwen_like("", trim=Trim.NOTHING)


def _invoke(section: str) -> ToolFormat:
    return _markup(
        MarkupFormat(
            call="<invoke name=",
            call_end="</invoke>",
            parameter="<parameter name=",
            parameter_end="</parameter>",
            attributes=_NAME,
            sections=(f"<{section}>",),
            section_ends=(f"</{section}>",),
        )
    )


MINIMAX_M2: Final = _invoke("minimax:tool_call")

DOTS: Final = _invoke("dots_function_call")

STEP3: Final = _markup(
    MarkupFormat(
        call="<steptml:invoke name=",
        call_end="</steptml:invoke>",
        parameter="<steptml:parameter name=",
        parameter_end="</steptml:parameter>",
        attributes=_NAME,
        sections=(
            f"<{_BAR}tool_calls_begin{_BAR}>",
            f"<{_BAR}tool_call_begin{_BAR}>function<{_BAR}tool_sep{_BAR}>",
        ),
        section_ends=(f"<{_BAR}tool_call_end{_BAR}>", f"<{_BAR}tool_calls_end{_BAR}>"),
        trim=Trim.SPACE,
    )
)

_DSML: Final = f"{_BAR}DSML{_BAR}"
DEEPSEEK_V32: Final = _markup(
    MarkupFormat(
        call=f"<{_DSML}invoke",
        call_end=f"</{_DSML}invoke>",
        parameter=f"<{_DSML}parameter",
        parameter_end=f"</{_DSML}parameter>",
        attributes=_DSML_NAME,
        sections=(f"<{_DSML}function_calls>", f"<{_DSML}tool_calls>"),
        section_ends=(f"</{_DSML}function_calls>", f"</{_DSML}tool_calls>"),
    )
)
"""Also DeepSeek V4, whose sections are tool_calls."""

"""Calls as the models of each family write them, the way their chat templates show."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from tests.unit.gateway.parsers.harness import Make
from tokenmesh.services.gateway.parsers import registry
from tokenmesh.services.gateway.parsers.parser import (
    CallArguments,
    CallBegin,
    Content,
    Event,
    ParseContext,
    ToolSchema,
)

BAR: Final = "\N{FULLWIDTH VERTICAL LINE}"
_BLOCK: Final = "\N{LOWER ONE EIGHTH BLOCK}"

TOOLS: Final = (
    ToolSchema(
        name="get_weather",
        parameters={
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "limit": {"type": "number"},
                "metric": {"type": "boolean"},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "where": {"type": "object"},
                "tags": {"type": "array"},
            },
        },
    ),
    ToolSchema(name="now", parameters={}),
)


class Call(NamedTuple):
    """A call as the client should get it."""

    name: str
    arguments: dict[str, Any]


def maker(family: str, tools: tuple[ToolSchema, ...] = TOOLS, seed: str = "") -> Make:
    """Makes parsers of a family."""
    context = ParseContext(tools=tools, seed=seed)
    return lambda: registry.TOOLS[family].make(context)


def calls_of(events: Sequence[Event]) -> list[tuple[str, str]]:
    """Names and argument texts."""
    calls: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, CallBegin):
            assert event.index == len(calls)
            calls.append((event.name, ""))
        elif isinstance(event, CallArguments):
            name, text = calls[event.index]
            calls[event.index] = (name, text + event.text)
    return calls


def content_of(events: Sequence[Event]) -> str:
    """All content."""
    return "".join(event.text for event in events if isinstance(event, Content))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _objects(calls: Sequence[Call], key: str = "arguments") -> list[dict[str, Any]]:
    return [{"name": call.name, key: call.arguments} for call in calls]


def gemma(begin: str, end: str, quote: str) -> Callable[[Sequence[Call]], str]:
    def value(each: Any) -> str:
        if isinstance(each, str):
            return f"{quote}{each}{quote}"
        if isinstance(each, dict):
            return f"{{{','.join(f'{key}:{value(inner)}' for key, inner in each.items())}}}"
        if isinstance(each, list):
            return f"[{','.join(map(value, each))}]"
        return _json(each)

    return lambda calls: "".join(
        f"{begin}call:{each.name}{value(each.arguments)}{end}" for each in calls
    )


def each_after(begin: str) -> Callable[[Sequence[Call]], str]:
    return lambda calls: "".join(f"{begin}{_json(each)}" for each in _objects(calls))


def hermes(calls: Sequence[Call]) -> str:
    blocks = (f"<tool_call>\n{_json(each)}\n</tool_call>" for each in _objects(calls))
    return "\n".join(blocks)


def array_between(begin: str, end: str) -> Callable[[Sequence[Call]], str]:
    return lambda calls: f"{begin}{_json(_objects(calls))}{end}"


def granite_20b(calls: Sequence[Call]) -> str:
    return "".join(f"<function_call> {_json(each)}" for each in _objects(calls))


def internlm(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<|action_start|><|plugin|>\n{_json(each)}<|action_end|>"
        for each in _objects(calls, "parameters")
    )


def llama(calls: Sequence[Call]) -> str:
    return "; ".join(map(_json, _objects(calls, "parameters")))


def mistral(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{call.name}[ARGS]{_json(call.arguments)}" for call in calls)


def kimi(calls: Sequence[Call]) -> str:
    inside = "".join(
        f"<|tool_call_begin|>functions.{call.name}:{index}<|tool_call_argument_begin|>"
        f"{_json(call.arguments)}<|tool_call_end|>"
        for index, call in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inside}<|tool_calls_section_end|>"


def deepseek_token(words: str) -> str:
    return f"<{BAR}{words.replace(' ', _BLOCK)}{BAR}>"


def _deepseek(one: Callable[[Call], str]) -> Callable[[Sequence[Call]], str]:
    def write(calls: Sequence[Call]) -> str:
        begin, end = deepseek_token("tool call begin"), deepseek_token("tool call end")
        inside = "\n".join(begin + one(call) + end for call in calls)
        return deepseek_token("tool calls begin") + inside + deepseek_token("tool calls end")

    return write


_SEPARATOR: Final = deepseek_token("tool sep")


def _deepseek_v3(call: Call) -> str:
    return f"function{_SEPARATOR}{call.name}\n```json\n{_json(call.arguments)}\n```"


def _deepseek_v31(call: Call) -> str:
    return f"{call.name}{_SEPARATOR}{_json(call.arguments)}"


def _bare(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def qwen3_coder(calls: Sequence[Call], prefix: str = "") -> str:
    blocks = []
    for call in calls:
        pairs = "".join(
            f"<parameter={key}>\n{_bare(value)}\n</parameter>\n"
            for key, value in call.arguments.items()
        )
        inside = f"<function={call.name}>\n{pairs}</function>"
        blocks.append(f"<{prefix}tool_call>\n{inside}\n</{prefix}tool_call>")
    return "\n".join(blocks)


def cohere(calls: Sequence[Call]) -> str:
    objects = [
        {"tool_call_id": str(place), "tool_name": call.name, "parameters": call.arguments}
        for place, call in enumerate(calls)
    ]
    inside = ",\n    ".join(map(_json, objects))
    return f"<|START_ACTION|>[\n    {inside}\n]<|END_ACTION|>"


def mimo(calls: Sequence[Call]) -> str:
    text = re.sub(r"(<parameter=\w+>)\n", r"\1", qwen3_coder(calls))
    return text.replace("\n</parameter>", "</parameter>")


def minimax(calls: Sequence[Call]) -> str:
    inside = "".join(
        f'<invoke name="{call.name}">\n'
        + "".join(
            f'<parameter name="{key}">{_bare(value)}</parameter>\n'
            for key, value in call.arguments.items()
        )
        + "</invoke>\n"
        for call in calls
    )
    return f"<minimax:tool_call>\n{inside}</minimax:tool_call>"


def step3(calls: Sequence[Call]) -> str:
    begin = f"<{BAR}tool_call_begin{BAR}>function<{BAR}tool_sep{BAR}>"
    inside = "\n".join(
        f'{begin}<steptml:invoke name="{call.name}">'
        + "".join(
            f'<steptml:parameter name="{key}"> {_bare(value)} </steptml:parameter>'
            for key, value in call.arguments.items()
        )
        + f"</steptml:invoke><{BAR}tool_call_end{BAR}>"
        for call in calls
    )
    return f"<{BAR}tool_calls_begin{BAR}>{inside}<{BAR}tool_calls_end{BAR}>"


def deepseek_v32(calls: Sequence[Call]) -> str:
    dsml = f"{BAR}DSML{BAR}"
    inside = ""
    for call in calls:
        inside += f'<{dsml}invoke name="{call.name}">\n'
        for key, value in call.arguments.items():
            kind = "true" if isinstance(value, str) else "false"
            inside += (
                f'<{dsml}parameter name="{key}" string="{kind}">{_bare(value)}</{dsml}parameter>\n'
            )
        inside += f"</{dsml}invoke>\n"
    return f"<{dsml}function_calls>\n{inside}</{dsml}function_calls>"


def glm45(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<tool_call>{call.name}\n"
        + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_bare(value)}</arg_value>\n"
            for key, value in call.arguments.items()
        )
        + "</tool_call>"
        for call in calls
    )


def glm47(calls: Sequence[Call]) -> str:
    return glm45(calls).replace("\n<arg", "<arg").replace("\n</tool", "</tool")


def _python(calls: Sequence[Call]) -> list[str]:
    return [
        f"{call.name}({', '.join(f'{key}={value!r}' for key, value in call.arguments.items())})"
        for call in calls
    ]


def pythonic(calls: Sequence[Call]) -> str:
    return f"[{', '.join(_python(calls))}]"


WRITERS: Final[Mapping[str, Callable[[Sequence[Call]], str]]] = {
    "deepseek_v3": _deepseek(_deepseek_v3),
    "deepseek_v31": _deepseek(_deepseek_v31),
    "cohere_command3": cohere,
    "deepseek_v32": deepseek_v32,
    "deepseek_v4": lambda calls: deepseek_v32(calls).replace("function_calls", "tool_calls"),
    "dots": lambda calls: minimax(calls).replace("minimax:tool_call", "dots_function_call"),
    "ernie45": hermes,
    "glm45": glm45,
    "glm47": glm47,
    "granite": array_between("<|tool_call|>", ""),
    "granite-20b-fc": granite_20b,
    "granite4": hermes,
    "hermes": hermes,
    "hunyuan_a13b": array_between("<tool_calls>", "</tool_calls>"),
    "internlm": internlm,
    "jamba": array_between("<tool_calls>", "</tool_calls>"),
    "kimi_k2": kimi,
    "apertus": lambda calls: (
        f"<|tools_prefix|>{_json([{each.name: each.arguments} for each in calls])}<|tools_suffix|>"
    ),
    "functiongemma": gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "gigachat3": each_after("<|function_call|>"),
    "lfm2": lambda calls: f"<|tool_call_start|>{pythonic(calls)}<|tool_call_end|>",
    "ling3": glm47,
    "longcat": lambda calls: hermes(calls).replace("tool_call>", "longcat_tool_call>"),
    "mimo": mimo,
    "llama3_json": llama,
    "llama4_json": llama,
    "llama4_pythonic": pythonic,
    "minimax_m2": minimax,
    "mistral": mistral,
    "olmo3": lambda calls: "<function_calls>\n" + "\n".join(_python(calls)) + "\n</function_calls>",
    "phi4_mini_json": array_between("functools", ""),
    "pythonic": pythonic,
    "qwen3_coder": qwen3_coder,
    "qwen3_xml": qwen3_coder,
    "seed_oss": lambda calls: qwen3_coder(calls, "seed:"),
    "step3": step3,
    "step3p5": qwen3_coder,
    "xlam": array_between("", ""),
}
"""Writers of calls, by family."""

OTHER_WRITERS: Final[Sequence[tuple[str, Callable[[Sequence[Call]], str]]]] = (
    ("gigachat3", each_after("<|message_sep|>\n\nfunction call<|role_sep|>\n")),
    ("granite", array_between("<tool_call> ", "")),
    ("llama3_json", lambda calls: "<|python_tag|>" + llama(calls)),
    ("llama4_pythonic", lambda calls: f"<|python_start|>{pythonic(calls)}<|python_end|>"),
    ("mistral", array_between("[TOOL_CALLS] ", "")),
    ("mistral", lambda calls: mistral(calls).replace("[ARGS]", "[CALL_ID]abcdefgh1[ARGS]")),
    ("mistral", lambda calls: mistral(calls).replace("[ARGS]", "")),
    ("xlam", array_between("```json\n", "\n```")),
    ("xlam", array_between("<tool_call>", "</tool_call>")),
    ("xlam", array_between("[TOOL_CALLS]", "")),
)
"""The second ways that some families have."""

ONLY_AT_START: Final = {"llama3_json", "llama4_json", "llama4_pythonic", "pythonic", "xlam"}
"""Families whose calls have no marker: no content stands before them."""

TYPICAL_CALLS: Final[Mapping[str, Sequence[Call]]] = {
    "single": [Call("get_weather", {"city": "Paris", "days": 3})],
    "parallel": [
        Call("get_weather", {"city": "Paris"}),
        Call("now", {}),
        Call("get_weather", {"city": "Oslo", "metric": True}),
    ],
    "nested": [
        Call(
            "get_weather",
            {"where": {"at": [1.5, {"deep": ["}", "]"]}], "is": None}, "tags": [[], {}, [True]]},
        )
    ],
    "unicode": [Call("get_weather", {"city": "S\u00e3o \u6771\u4eac \U0001f600 \u00df"})],
    "escapes": [Call("get_weather", {"city": 'a "quoted" \\d+ \\n C:\\dir {x} [y] ,)('})],
    "newlines": [Call("get_weather", {"city": "def f():\n\treturn 1\n\n# end"})],
    "empty": [Call("now", {})],
    "bare values": [
        Call("get_weather", {"days": -7, "limit": 0.25, "metric": False, "note": None})
    ],
    "unknown function": [Call("rm.rf-all", {"path": "/tmp", "really": "yes"})],
}
"""Calls by their kind."""

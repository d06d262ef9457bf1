"""Calls that are none, or broke off, or stand where no call should: nothing is lost."""

import json

import pytest

from tests.unit.gateway.parsers.harness import check_chunkings
from tests.unit.gateway.parsers.tool_formats import BAR, calls_of, content_of, deepseek_token, maker

BEGIN, END = deepseek_token("tool call begin"), deepseek_token("tool call end")
SEPARATOR = deepseek_token("tool sep")
DSML = f"{BAR}DSML{BAR}"

Calls = list[tuple[str, str]]

GIVEN_BACK = [
    ("hermes", "<tool_call></tool_call>"),
    ("hermes", "<tool_call>\nnot json\n</tool_call>"),
    ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call> \n'),
    ("hermes", '<tool_call>{"arguments": {"a": "}'),
    ("hermes", '<tool_call>\n{"name": "get_w'),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"data": {"name": "x", "arguments": {}}}</tool_call>'),
    ("hermes", '<tool_call>{name: "x"}</tool_call>'),
    ("hermes", "Say <tool_call> or </tool_call>, not <tool_call"),
    ("hermes", "<tool_call>[]</tool_call>"),
    ("granite", '<|tool_call|>\n[{"x": 1}] text'),
    ("phi4_mini_json", "import functools, functools.cache and functools[0]"),
    ("internlm", '<|action_start|><|interpreter|>\nprint({"a": 1})<|action_end|>'),
    ("llama3_json", '{"name": "Bob", "age": 3}'),
    ("llama3_json", '{"name": "Bob"}'),
    ("llama3_json", '{"parameters": {"a": 1}}'),
    ("llama3_json", 'See {"name": "f", "parameters": {}}'),
    ("llama3_json", "<|python_tag|>print(1)"),
    ("xlam", '```json\n{"name": "x"}\n``` and ```python\nf({"name": 1})\n```'),
    ("xlam", "[1, 2] are numbers"),
    ("mistral", "[TOOL_CALLS] not a name {1}"),
    ("mistral", "[TOOL_CALLS]get_weather"),
    ("mistral", "[TOOL_CALLS]get_weather[ARG"),
    ("mistral", "[TOOL_CALLS]get_weather[CALL_ID]abc and so on"),
    ("mistral", '[TOOL_CALLS] [{"arguments": {"a": [1'),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_calls_section_end|>"),
    ("kimi_k2", "<|tool_call_begin|>functions.x:0<|tool_call_end|>"),
    ("kimi_k2", "<|tool_call_begin|>two words<|tool_call_argument_begin|>{}"),
    ("deepseek_v3", f"{BEGIN}function{SEPARATOR}f\n{{}}"),
    ("deepseek_v3", f"{BEGIN}tool{SEPARATOR}f\n```json\n{{}}\n```"),
    ("deepseek_v31", f"{BEGIN}get_weather"),
    ("qwen3_coder", "<tool_call>\n<function=two words>\n</function>"),
    ("qwen3_coder", "<tool_call>\n<function=f\n<parameter=a>1</parameter>"),
    ("qwen3_coder", "<tool_call>\n{}\n</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=get_w"),
    ("qwen3_coder", "<tool_call>\n <tool_call> x"),
    ("minimax_m2", "<minimax:tool_call></minimax:tool_call>"),
    ("deepseek_v32", f"<{DSML}invoke name=>"),
    ("glm45", "<tool_call>say what</tool_call>"),
    ("glm45", "<tool_call>get_wea"),
    ("glm45", "<tool_call>\n</tool_call>"),
    ("pythonic", "[see](there)"),
    ("pythonic", "[f(x)](there)"),
    ("pythonic", "[f('positional')]"),
    ("pythonic", "[get_weather(ci"),
    ("pythonic", "  []"),
    ("pythonic", "Calls: [f(a=1)]"),
    ("pythonic", "f(a=1)"),
    ("olmo3", "<function_calls>\n</function_calls>"),
    ("olmo3", "<function_calls>\nno call\n</function_calls>"),
]


@pytest.mark.parametrize(("family", "text"), GIVEN_BACK)
def test_text_that_is_not_a_call_is_unchanged_content(family: str, text: str) -> None:
    events = check_chunkings(maker(family), text, count=50)
    assert calls_of(events) == []
    assert content_of(events) == text


ONE = '{"name": "f", "arguments": {"a": 1}}'

TABLE: list[tuple[str, str, Calls, str]] = [
    # Keys in another order, other members, a repeated key.
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>',
     [("f", '{"a": 1}')], ""),
    ("hermes", '<tool_call>{"id": "7", "type": ["x"], "name": "f", "parameters": {"a": 1}}',
     [("f", '{"a": 1}')], ""),
    ("hermes", '<tool_call>{"name": "f", "name": "g", "arguments": {}, "parameters": {"b": 2}}',
     [("f", "{}")], ""),
    ("hermes", '<tool_call>{"n\\u0061me": "f\\u00fc", "arguments": {}}</tool_call>',
     [("f\u00fc", "{}")], ""),
    ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
     [("\\ud800", "{}")], ""),
    # White space around a call.
    ("hermes", f"Hi.\n\n<tool_call>{ONE}</tool_call>Ho.", [("f", '{"a": 1}')], "Hi.Ho."),
    ("granite", f"Hi.\n\n<tool_call>[{ONE}]Ho.", [("f", '{"a": 1}')], "Hi.Ho."),
    ("hermes", f" \n<tool_call>{ONE}</tool_call>\n\n", [("f", '{"a": 1}')], ""),
    # Arguments that are no object.
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', [("f", "{}")], ""),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', [("f", "{}")], ""),
    ("hermes", '<tool_call>{"name": "f", "arguments": ""}</tool_call>', [("f", "{}")], ""),
    ("hermes", '<tool_call>{"arguments": "{\\"a\\": \\"\\\\u00e9\\\\n\\"}", "name": "f"}',
     [("f", '{"a": "\\u00e9\\n"}')], ""),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1', [("f", '{"a": 1')], ""),
    # Almost JSON.
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x\n\ty"}}</tool_call>',
     [("f", '{"a": "x\\n\\ty"}')], ""),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\d\\\n"}}</tool_call>',
     [("f", '{"a": "\\\\d\\\\\\n"}')], ""),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": True}}</tool_call>',
     [("f", '{"a": True}')], ""),
    ("hermes", f"<tool_call>{ONE}}}\n</tool_call>", [("f", '{"a": 1}')], ""),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>!',
     [("f", '{"a": 1}')], "!"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>!',
     [("f", '{"a": 1')], "!"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1<5}}</tool_call>!',
     [("f", '{"a": 1<5}')], "!"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>',
     [("f", '{"a": "</tool_call>"}')], ""),
    ("hermes", f'<tool_call>{{"name": "x", "arguments": {{<tool_call>{ONE}</tool_call>',
     [("x", "{"), ("f", '{"a": 1}')], ""),
    ("hermes", '<tool_call>{"name": "f", oops "arguments": {}}</tool_call>',
     [], '<tool_call>{"name": "f", oops "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, oops: 1}</tool_call>',
     [("f", "{}")], "oops: 1}"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, "x" 1}</tool_call>',
     [("f", "{}")], '"x" 1}'),
    ("hermes", '<tool_call>{"name": "f", "args": {"a": 1}}</tool_call>',
     [], '<tool_call>{"name": "f", "args": {"a": 1}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "argum', [("f", "")], ""),
    ("hermes", '<tool_call>{"name": "f", "arguments"', [("f", "")], ""),
    ("hermes", '<tool_call>{"name": "f", "other', [], '<tool_call>{"name": "f", "other'),
    # Several in one block, in an array, with text between.
    ("hermes", f"<tool_call>{ONE}\n{ONE}</tool_call>", [("f", '{"a": 1}')] * 2, ""),
    ("hermes", f"<tool_call>[{ONE}, {ONE}]</tool_call>", [("f", '{"a": 1}')] * 2, ""),
    ("hermes", f"<tool_call>{ONE} and </tool_call> so </tool_call>",
     [("f", '{"a": 1}')], " and so </tool_call>"),
    ("hermes", f'a<tool_call>{ONE}</tool_call> b <tool_call>{{"x": 1}}</tool_call>\nc\n',
     [("f", '{"a": 1}')], 'a b <tool_call>{"x": 1}</tool_call>\nc\n'),
    ("hermes", f"<tool_call> is how.\n<tool_call>{ONE}</tool_ca",
     [("f", '{"a": 1}')], "<tool_call> is how."),
    ("granite", f"<|tool_call|>[{ONE}] [1] and <|tool_call|> {ONE}",
     [("f", '{"a": 1}')] * 2, " [1] and"),
    ("granite", f"<tool_call>[{ONE}]] {ONE}", [("f", '{"a": 1}')], "] " + ONE),
    ("granite", f"<tool_call>{ONE}, then", [("f", '{"a": 1}')], ", then"),
    ("jamba", f'<tool_calls>[{ONE}, {{"x": 2}}]</tool_calls>',
     [("f", '{"a": 1}')], ', {"x": 2}'),
    ("jamba", f"<tool_calls>[{ONE}, {{", [("f", '{"a": 1}')], ", {"),
    ("llama3_json", ' {"name": "f", "parameters": {"a": ', [("f", '{"a": ')], ""),
    ("llama3_json", '<|python_tag|>{"name": "f"}', [("f", "{}")], ""),
    # Headers and bare JSON.
    ("mistral", '[TOOL_CALLS]f{"a": 1} and more', [("f", '{"a": 1}')], " and more"),
    ("mistral", "[TOOL_CALLS]f[ARGS]", [("f", "")], ""),
    ("mistral", "[TOOL_CALLS]f[ARGS]oops[TOOL_CALLS]g[ARGS]{}", [("f", "oops"), ("g", "{}")], ""),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1',
     [("f", '{"a": 1')], ""),
    ("kimi_k2", "<|tool_call_begin|>f<|tool_call_argument_begin|><|tool_call_end|>",
     [("f", "{}")], ""),
    ("kimi_k2", "<|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>{<|tool_call_end|> x",
     [("f", "{")], " x"),
    ("deepseek_v3", f'{BEGIN}function{SEPARATOR}f\n```json\n{{"a": "```"}}\n``',
     [("f", '{"a": "```"}')], ""),
    ("deepseek_v31", f"{BEGIN}f{SEPARATOR}not json{END} x", [("f", "not json")], " x"),
    # Tags.
    ("qwen3_coder", "<function=f>\n<parameter=a>\n\nx\n\n</parameter>\n</function> x",
     [("f", '{"a": "\\nx\\n"}')], " x"),
    ("qwen3_coder", "<function=f><parameter=a>1<parameter=b>2</function></tool_call>",
     [("f", '{"a": "1", "b": "2"}')], ""),
    ("qwen3_coder", "<tool_call><function=f><parameter=a></parameter></tool_call>",
     [("f", '{"a": ""}')], ""),
    ("qwen3_coder", "<tool_call><function=f>oops</function></tool_call>", [("f", "{}")], "oops"),
    ("qwen3_coder", '<function="f"><parameter=\'a b\'>x</parameter></function>',
     [("f", '{"a b": "x"}')], ""),
    ("qwen3_coder", "<function=f><parameter=a>\nx\n", [("f", '{"a": "x')], ""),
    ("qwen3_coder", "<function=f><parameter=>1</parameter></function>",
     [("f", "{}")], "<parameter=>1</parameter>"),
    ("qwen3_coder", '<function=get_weather><parameter=where>{"a": ',
     [("get_weather", '{"where": {"a": ')], ""),
    ("qwen3_coder", "<function=get_weather><parameter=days>4", [("get_weather", '{"days": 4')], ""),
    ("minimax_m2", "<invoke name='f'><parameter name=a> x </parameter></invoke>",
     [("f", '{"a": " x "}')], ""),
    ("deepseek_v32", f'<{DSML}invoke name="f"><{DSML}parameter name="a" string="false">oops'
     f'</{DSML}parameter></{DSML}invoke>', [("f", '{"a": "oops"}')], ""),
    ("glm45", "<tool_call>f</tool_call>", [("f", "{}")], ""),
    ("glm45", "<tool_call>f<arg_key> a\n</arg_key><arg_value> x </arg_value></tool_call>",
     [("f", '{"a": " x "}')], ""),
    ("glm45", "<tool_call>f<arg_key>a</arg_key>oops</tool_call> x",
     [("f", "{}")], "<arg_key>a</arg_key>oops x"),
    ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>x<arg_key>b</arg_key><arg_value>y",
     [("f", '{"a": "x", "b": "y')], ""),
    # Python.
    ("pythonic", "[f(a=1, b='x', )]", [("f", '{"a": 1, "b": "x"}')], ""),
    ("pythonic", " [ f ( a=1 ) ]", [], " [ f ( a=1 ) ]"),
    ("pythonic", "[f(a=1), oops] x", [("f", '{"a": 1}')], ", oops] x"),
    ("pythonic", "[f(a=1)[g()]", [("f", '{"a": 1}')], "[g()]"),
    ("pythonic", "[f(a=1, 2), g()] x", [("f", '{"a": 1}')], ", 2), g()] x"),
    ("pythonic", "[f(a=g(1), b={1, 2})]", [("f", '{"a": "g(1)", "b": "{1, 2}"}')], ""),
    ("pythonic", "[f(a='it\\'s', b=[1, 'x", [("f", '{"a": "it\'s", "b": [1, "x')], ""),
    ("pythonic", "[f(a=1, ci", [("f", '{"a": 1, "ci')], ""),
    ("qwen3_coder", "<function=f>\n<parameter=ci", [("f", '{"ci')], ""),
    ("qwen3_coder", "<function=f>\n<parameter=ci>1</parameter></func", [("f", '{"ci": "1"')], ""),
    ("minimax_m2", '<invoke name="f"><parameter name="ci', [("f", '{"ci')], ""),
    ("deepseek_v32", f'<{DSML}invoke name="f"><{DSML}parameter name="ci', [("f", '{"ci')], ""),
    ("glm45", "<tool_call>f<arg_key>ci", [("f", '{"ci')], ""),
    ("glm45", "<tool_call>f<arg_key>ci</arg_key>\n<arg_va", [("f", '{"ci')], ""),
    ("pythonic", "[f(a=1, g())]", [("f", '{"a": 1}')], ", g())]"),
    ("llama4_pythonic", "<|python_start|>[f()]<|python_end|> x", [("f", "{}")], " x"),
    ("olmo3", "<function_calls>f(a=1) oops</function_calls>", [("f", '{"a": 1}')], " oops"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "text", "calls", "content"), TABLE)
def test_an_incomplete_call_is_emitted_as_far_as_it_came(
    family: str, text: str, calls: Calls, content: str
) -> None:
    events = check_chunkings(maker(family), text, count=50)
    assert calls_of(events) == calls
    assert content_of(events) == content


def test_the_repairs_of_strings_make_json() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "x\n\\d\\\t\\\\n\x00"}}</tool_call>'
    (call,) = calls_of(check_chunkings(maker("hermes"), text))
    assert json.loads(call[1]) == {"a": "x\n\\d\\\t\\n\x00"}

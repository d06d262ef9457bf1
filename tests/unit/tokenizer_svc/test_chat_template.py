"""Templates render what transformers' apply_chat_template renders."""

import json

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tests.fakes import chat_templates
from tokenmesh.services.tokenizer_svc.render_child import render_job
from tokenmesh.services.tokenizer_svc.render_job import (
    JsonObject,
    Rendered,
    RenderFailed,
    RenderJob,
)

SPECIAL: JsonObject = {"bos_token": "<s>", "eos_token": "</s>"}
SYSTEM: JsonObject = {"role": "system", "content": " Be brief. "}
USER: JsonObject = {"role": "user", "content": "Hi <b>&'\u00e9 "}
ASSISTANT: JsonObject = {"role": "assistant", "content": "<think>hm</think>Hello\n"}
TOOL: JsonObject = {
    "type": "function",
    "function": {"name": "sum", "description": "adds <x>", "parameters": {"type": "object"}},
}
ARGUMENTS = '{"a": 1, "b": "\u00e9"}'


def call(arguments: object) -> JsonObject:
    function: JsonObject = {"name": "sum", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}]}


RESULT: JsonObject = {"role": "tool", "tool_call_id": "1", "content": "2"}


@pytest.fixture(scope="module")
def oracle() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **SPECIAL)


def render(template: str, messages: list[JsonObject], **fields: object) -> str:
    answer = ask(template, messages, **fields)
    assert isinstance(answer, Rendered), answer
    return answer.text


def ask(template: str, messages: list[JsonObject], **fields: object) -> Rendered | RenderFailed:
    variables = {**SPECIAL, **fields.pop("variables", {})}  # type: ignore[dict-item]
    return render_job(
        RenderJob(
            template=template,
            messages=json.loads(json.dumps(messages)),
            variables=variables,
            max_chars=100_000,
            **fields,  # type: ignore[arg-type]
        )
    )


def expected(
    oracle: PreTrainedTokenizerFast, template: str, messages: list[JsonObject], **fields: object
) -> str:
    text = oracle.apply_chat_template(
        json.loads(json.dumps(messages)), chat_template=template, tokenize=False, **fields
    )
    assert isinstance(text, str)
    return text


TEXT_TEMPLATES = {
    "chatml": chat_templates.CHATML,
    "llama3": chat_templates.LLAMA3,
    "mistral": chat_templates.MISTRAL,
    "deepseek": chat_templates.DEEPSEEK,
    "parts": chat_templates.PARTS,
    "documents": chat_templates.DOCUMENTS,
}


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("name", TEXT_TEMPLATES)
def test_text_conversations_render_as_in_transformers(
    oracle: PreTrainedTokenizerFast, name: str, add_generation_prompt: bool
) -> None:
    turns = [USER, ASSISTANT, USER]
    for messages in (turns[:1], turns) if name == "mistral" else (turns[:1], [SYSTEM, *turns]):
        fields = {"add_generation_prompt": add_generation_prompt}
        assert render(TEXT_TEMPLATES[name], messages, **fields) == expected(
            oracle, TEXT_TEMPLATES[name], messages, **fields
        )


@pytest.mark.parametrize("name", ["chatml", "llama3"])
def test_tools_and_calls_render_as_in_transformers(
    oracle: PreTrainedTokenizerFast, name: str
) -> None:
    template = TEXT_TEMPLATES[name]
    ours = render(template, [SYSTEM, USER, call(ARGUMENTS), RESULT], tools=[TOOL])
    theirs = expected(
        oracle,
        template,
        [SYSTEM, USER, call(json.loads(ARGUMENTS)), RESULT],
        tools=[TOOL],
        add_generation_prompt=True,
    )
    assert ours == theirs
    assert '"b": "\u00e9"' in ours


def test_a_template_that_pastes_arguments_gets_the_clients_own_text(
    oracle: PreTrainedTokenizerFast,
) -> None:
    messages = [USER, call(ARGUMENTS), RESULT, USER]
    ours = render(chat_templates.DEEPSEEK, messages)
    theirs = expected(oracle, chat_templates.DEEPSEEK, messages, add_generation_prompt=True)
    assert ours == theirs


@pytest.mark.parametrize("arguments", ["", None, "{}"])
def test_a_call_without_arguments_has_an_empty_object(arguments: object) -> None:
    assert '"arguments": {}' in render(chat_templates.CHATML, [USER, call(arguments)])


@pytest.mark.parametrize(
    ("calls", "place"),
    [
        ("x", "messages[1].tool_calls is not a list"),
        (["x"], "messages[1].tool_calls[0].function is not an object"),
        ([{"function": 1}], "messages[1].tool_calls[0].function is not an object"),
        ([{"function": {}}], "messages[1].tool_calls[0].function.name is missing or not a string"),
        ([{"id": 1, "function": {"name": "f"}}], "messages[1].tool_calls[0].id is not a string"),
        (
            [{"function": {"name": "f", "arguments": 1}}],
            "messages[1].tool_calls[0].function.arguments is neither a string nor an object",
        ),
    ],
)
def test_malformed_calls_are_refused_with_their_place(calls: object, place: str) -> None:
    message: JsonObject = {"role": "assistant", "content": "", "tool_calls": calls}
    answer = ask(chat_templates.CHATML, [USER, message])
    assert isinstance(answer, RenderFailed)
    assert (answer.kind, answer.reason) == ("input", place)


def test_the_id_of_a_result_is_a_string() -> None:
    answer = ask(chat_templates.CHATML, [USER, {**RESULT, "tool_call_id": 1}])
    assert isinstance(answer, RenderFailed)
    assert answer.reason == "messages[1].tool_call_id is not a string"
    assert answer.path == ("messages", 1, "tool_call_id")


def test_an_empty_list_of_calls_counts_as_none() -> None:
    message: JsonObject = {"role": "assistant", "content": "yes", "tool_calls": []}
    template = "{% for m in messages %}{{ 'tool_calls' in m }};{% endfor %}"
    assert render(template, [USER, message]) == "False;False;"


WRONG_ARGUMENTS = {
    '{"city":': "is not JSON",
    "{": "is not JSON",
    '{"city": "Par': "is not JSON",
    "call me": "is not JSON",
    '{"a": 1}{"a": 1}': "is not JSON",
    "{'a': 1}": "is not JSON",
    '{"a": ' + 5000 * "9" + "}": "is not JSON",
    "[1]": "is not the JSON text of an object",
    "null": "is not the JSON text of an object",
    '"{}"': "is not the JSON text of an object",
    "[" * 90_000: "is nested too deeply",
    r'{"a": "\ud83d\ude00", "b": "\ud800"}': "holds one half of a surrogate pair",
    r'{"\uDFFF": 1}': "holds one half of a surrogate pair",
}


@pytest.mark.parametrize("arguments", WRONG_ARGUMENTS, ids=range(len(WRONG_ARGUMENTS)))
def test_arguments_without_an_object_are_taken_back_with_a_warning(arguments: str) -> None:
    """A model has written them: `max_tokens` cuts calls, and so do clients and other servers."""
    conversation = [USER, call(arguments), RESULT, USER]
    for template, shown in (
        (chat_templates.CHATML, '"arguments": {}'),
        (chat_templates.DEEPSEEK, arguments),
    ):
        answer = ask(template, conversation)
        assert isinstance(answer, Rendered)
        assert shown in answer.text
        (warning,) = answer.warnings
        assert warning.path == ("messages", 1, "tool_calls", 0, "function", "arguments")
        assert warning.problem.startswith(WRONG_ARGUMENTS[arguments])


def test_a_conversation_of_wrong_arguments_has_a_bounded_number_of_warnings() -> None:
    answer = ask(chat_templates.CHATML, [USER, *[call("{")] * 100])
    assert isinstance(answer, Rendered)
    assert len(answer.warnings) == 16


def test_documents_and_template_variables_render_as_in_transformers(
    oracle: PreTrainedTokenizerFast,
) -> None:
    messages: list[JsonObject] = [
        {"role": "hidden", "content": "x"},
        USER,
        {**USER, "role": "last"},
        ASSISTANT,
    ]
    documents: list[JsonObject] = [{"title": "T", "text": "one"}, {"title": "U", "text": "two"}]
    template = chat_templates.DOCUMENTS
    ours = render(template, messages, documents=documents, variables={"style": "fancy"})
    assert ours == expected(
        oracle, template, messages, documents=documents, style="fancy", add_generation_prompt=True
    )
    assert "fancy" in ours


def test_template_variables_switch_thinking_off(oracle: PreTrainedTokenizerFast) -> None:
    ours = render(chat_templates.CHATML, [USER], variables={"enable_thinking": False})
    assert ours.endswith("<think>\n\n</think>\n\n")
    assert ours == expected(
        oracle,
        chat_templates.CHATML,
        [USER],
        enable_thinking=False,
        add_generation_prompt=True,
    )


@pytest.mark.parametrize("text", ["The answer is", "The answer is ", "a\n\n", "is is"])
@pytest.mark.parametrize("name", ["chatml", "llama3", "deepseek", "parts"])
def test_the_final_message_is_continued_as_in_transformers(
    oracle: PreTrainedTokenizerFast, name: str, text: str
) -> None:
    messages: list[JsonObject] = [USER, {"role": "assistant", "content": text}]
    template = TEXT_TEMPLATES[name]
    ours = render(template, messages, add_generation_prompt=False, continue_final_message=True)
    assert ours == expected(oracle, template, messages, continue_final_message=True)


def test_the_last_text_of_a_final_list_of_parts_is_continued(
    oracle: PreTrainedTokenizerFast,
) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two "}, {"type": "image"}]
    messages: list[JsonObject] = [USER, {"role": "assistant", "content": parts}]
    template = chat_templates.PARTS
    ours = render(template, messages, add_generation_prompt=False, continue_final_message=True)
    assert ours == expected(oracle, template, messages, continue_final_message=True)
    assert ours.endswith("onetwo ")


@pytest.mark.parametrize(
    ("template", "content"),
    [
        ("nothing is printed", "x"),
        (chat_templates.PARTS, [{"type": "image"}]),
    ],
)
def test_without_any_text_there_is_nothing_to_continue(template: str, content: object) -> None:
    answer = ask(
        template,
        [{"role": "assistant", "content": content}],
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert isinstance(answer, RenderFailed)
    assert answer.kind == "input"


def test_a_final_message_that_the_template_drops_cannot_be_continued() -> None:
    messages: list[JsonObject] = [USER, {"role": "function", "content": "lost"}]
    answer = ask(
        chat_templates.CHATML, messages, add_generation_prompt=False, continue_final_message=True
    )
    assert isinstance(answer, RenderFailed)
    assert "continue_final_message" in answer.reason


def test_the_templates_own_refusal_reaches_the_client() -> None:
    answer = ask(chat_templates.MISTRAL, [USER, USER])
    assert isinstance(answer, RenderFailed)
    assert answer.kind == "raised"
    assert answer.reason.startswith("Conversation roles must alternate")


def test_reasoning_is_found_under_each_of_its_names() -> None:
    template = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }};{% endfor %}"
    messages: list[JsonObject] = [
        {"role": "assistant", "content": "", name: "hm"}
        for name in ("reasoning", "reasoning_content", "thinking")
    ]
    assert render(template, messages) == "hm|hm;" * 3


def test_a_syntax_error_names_its_line() -> None:
    answer = ask("{{ messages }}\n{% if %}\n", [USER])
    assert isinstance(answer, RenderFailed)
    assert (answer.kind, answer.line) == ("syntax", 2)


def test_a_runtime_error_names_its_line() -> None:
    answer = ask("one\ntwo\n{{ messages[0].missing.field }}\n", [USER])
    assert isinstance(answer, RenderFailed)
    assert (answer.kind, answer.line) == ("error", 3)
    assert "UndefinedError" in answer.reason


def test_dates_follow_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmesh.shared.clock.wall_s", lambda: 86400.0 * 365)
    assert render("{{ strftime_now('%Y') }}", [USER]) == "1971"


STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
SILENT = (
    "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}{% endif %}"
    "{% for m in messages %}{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endif %}"
    "{% endfor %}"
)
IN_PARTS = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<{{ m.role }}>{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("template", [STRICT, SILENT, IN_PARTS])
@pytest.mark.parametrize("start", [[], [SYSTEM]])
def test_later_system_messages_join_the_first_where_the_template_drops_or_refuses_them(
    template: str, start: list[JsonObject]
) -> None:
    """Without the flag, which only the Messages API sets, they are refused or lost."""
    later: list[JsonObject] = [
        {"role": "system", "content": "Reminder 1"},
        {"role": "user", "content": "b"},
        {"role": "system", "content": [{"type": "text", "text": "Reminder 2"}]},
    ]
    given: list[JsonObject] = [*start, {"role": "user", "content": "a"}, *later]
    text = " Be brief. \nReminder 1\nReminder 2" if start else "Reminder 1\nReminder 2"
    assert render(template, given, merges_system=True) == f"<system>{text}<user>a<user>b"
    plain = ask(template, given)
    assert not isinstance(plain, Rendered) or "Reminder 2" not in plain.text


def test_system_messages_stay_where_they_are_where_the_template_prints_them() -> None:
    given: list[JsonObject] = [SYSTEM, USER, {"role": "system", "content": "Reminder"}, USER]
    merged = render(chat_templates.CHATML, given, merges_system=True)
    assert merged == render(chat_templates.CHATML, given)
    assert merged.index("Hi") < merged.index("Reminder")


def test_a_continued_message_and_warnings_keep_their_places_when_system_messages_join() -> None:
    broken = call("{")
    given: list[JsonObject] = [
        USER,
        {"role": "system", "content": "Reminder"},
        broken,
        {"role": "assistant", "content": "So"},
    ]
    answer = ask(
        STRICT, given, merges_system=True, continue_final_message=True, add_generation_prompt=False
    )
    assert isinstance(answer, Rendered), answer
    assert answer.text.startswith("<system>Reminder<user>")
    assert answer.text.endswith("<assistant>So")
    assert [warning.path[:2] for warning in answer.warnings] == [("messages", 2)]

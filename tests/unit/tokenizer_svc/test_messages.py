"""Whatever a request holds, it becomes a conversation and a text, or an error that can be read."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import chat_templates
from tokenmesh.services.tokenizer_svc.messages import MediaPart, read_conversation
from tokenmesh.services.tokenizer_svc.render_child import render_job
from tokenmesh.services.tokenizer_svc.render_job import RenderJob, decode_answer, decode_job, encode
from tokenmesh.shared.config.model import TokenizerSettings
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.messages.tokenize import ChatPrompt

LIMITS = TokenizerSettings()

TEXT = st.text(max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
PART = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["text", "image_url", "refusal", "audio"]) | JSON,
        "text": TEXT | JSON,
        "refusal": JSON,
        "image_url": TEXT | JSON,
        "uuid": JSON,
    },
)
CALL = st.fixed_dictionaries(
    {},
    optional={
        "id": JSON,
        "function": st.fixed_dictionaries(
            {}, optional={"name": TEXT | JSON, "arguments": JSON.map(json.dumps) | JSON}
        )
        | JSON,
    },
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]) | JSON},
    optional={
        "content": TEXT | st.lists(PART | TEXT | JSON, max_size=3) | JSON,
        "tool_calls": st.lists(CALL, max_size=2) | JSON,
        "reasoning": JSON,
        "name": JSON,
    },
)
TEMPLATES = [
    chat_templates.CHATML,
    chat_templates.DEEPSEEK,
    chat_templates.LLAMA3,
    chat_templates.MISTRAL,
    chat_templates.PARTS,
    chat_templates.PARTS_ONLY,
]


@given(st.lists(MESSAGE | JSON, max_size=4), st.sampled_from(TEMPLATES), JSON, st.booleans())
def test_no_conversation_breaks_the_tokenizer(
    messages: list[object], template: str, variables: object, continues: bool
) -> None:
    prompt = ChatPrompt(
        messages_json=json.dumps(messages).encode(),
        template_kwargs_json=json.dumps(variables).encode(),
        add_generation_prompt=not continues,
        continue_final_message=continues,
    )
    try:
        conversation = read_conversation(prompt, LIMITS)
    except InvalidInput:
        return
    job = RenderJob(
        template=template,
        messages=conversation.messages,
        variables=conversation.variables,
        add_generation_prompt=not continues,
        continue_final_message=continues,
        placeholders={"image": "<image>"},
        max_chars=10_000,
    )
    answer = render_job(decode_job(encode(job)))
    assert decode_answer(encode(answer)) == answer


def test_images_are_set_apart_in_the_order_of_their_parts() -> None:
    content = [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": "http://x/1"}, "uuid": "u"},
        "b",
        {"type": "input_image", "image_url": "http://x/2"},
    ]
    prompt = ChatPrompt(messages_json=json.dumps([{"role": "user", "content": content}]).encode())
    conversation = read_conversation(prompt, LIMITS)
    assert conversation.media == [
        MediaPart(("messages", 0, "content", 1), "http://x/1", "u"),
        MediaPart(("messages", 0, "content", 3), "http://x/2"),
    ]
    assert conversation.messages[0]["content"] == [
        {"type": "text", "text": "a"},
        {"type": "image"},
        {"type": "text", "text": "b"},
        {"type": "image"},
    ]


@pytest.mark.parametrize("field", ["tools_json", "documents_json"])
def test_an_empty_list_counts_as_none(field: str) -> None:
    messages = b'[{"role":"user","content":"x"}]'
    prompt = ChatPrompt(messages_json=messages, **{field: b"[]"})  # type: ignore[arg-type]
    conversation = read_conversation(prompt, LIMITS)
    assert conversation.tools is None
    assert conversation.documents is None

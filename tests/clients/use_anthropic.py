"""anthropic: messages, streams, tools, counts of tokens."""

import os

import anthropic

CHAT = os.environ["CHAT_MODEL"]
MESSAGES = [{"role": "user", "content": "What is 27 + 45?"}]
TOOL = {
    "name": "add",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}

client = anthropic.Anthropic(base_url=os.environ["TOKENMESH_URL"], api_key="none")
message = client.messages.create(model=CHAT, max_tokens=100, messages=MESSAGES)
assert "72" in message.content[0].text
with client.messages.stream(model=CHAT, max_tokens=100, messages=MESSAGES) as stream:
    assert "".join(stream.text_stream) == message.content[0].text
choice = {"type": "any", "disable_parallel_tool_use": True}
called = client.messages.create(
    model=CHAT, max_tokens=100, messages=MESSAGES, tools=[TOOL], tool_choice=choice
)
assert called.content[-1].type == "tool_use", called
assert set(called.content[0].input) == {"a"}
count = client.messages.count_tokens(model=CHAT, messages=MESSAGES)
usage = message.usage
cached = usage.cache_read_input_tokens + usage.cache_creation_input_tokens
assert count.input_tokens == usage.input_tokens + cached, (count, usage)

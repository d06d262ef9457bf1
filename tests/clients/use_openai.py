"""openai: chat, streams, tools, structured output, responses, completions, embeddings."""

import os

import openai
from pydantic import BaseModel

URL = os.environ["TOKENMESH_URL"]
CHAT, EMBEDDER = os.environ["CHAT_MODEL"], os.environ["EMBEDDING_MODEL"]
SUM = "What is 27 + 45?"
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


class Person(BaseModel):
    name: str
    age: int


client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none")
assert CHAT in {model.id for model in client.models.list()}
question = [{"role": "user", "content": SUM}]
chat = client.chat.completions.create(model=CHAT, messages=question)
assert "72" in chat.choices[0].message.content, chat
assert chat.usage.total_tokens == chat.usage.prompt_tokens + chat.usage.completion_tokens

chunks = list(
    client.chat.completions.create(
        model=CHAT, messages=question, stream=True, stream_options={"include_usage": True}
    )
)
text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
assert text == chat.choices[0].message.content
# The second finds a part of its prompt cached.
for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
    assert getattr(chunks[-1].usage, count) == getattr(chat.usage, count), chunks[-1].usage

called = client.chat.completions.create(
    model=CHAT, messages=question, tools=[TOOL], tool_choice="required", max_tokens=100
)
assert {each.function.name for each in called.choices[0].message.tool_calls} == {"add"}
parsed = client.chat.completions.parse(model=CHAT, messages=question, response_format=Person)
assert isinstance(parsed.choices[0].message.parsed, Person)
response = client.responses.create(model=CHAT, input=SUM)
assert "72" in response.output_text
assert client.responses.retrieve(response.id).output_text == response.output_text
completion = client.completions.create(model=CHAT, prompt="Once upon", max_tokens=4)
assert completion.usage.completion_tokens <= 4

vectors = client.embeddings.create(model=EMBEDDER, input=["a fox", "an animal", "a stone"])
plain = client.embeddings.create(model=EMBEDDER, input="a fox", encoding_format="float")
assert vectors.data[0].embedding == plain.data[0].embedding
assert len(vectors.data) == 3
try:
    client.chat.completions.create(model="missing", messages=question)
except openai.NotFoundError as error:
    assert "missing" in str(error)
else:
    raise AssertionError("a model that does not exist has answered")

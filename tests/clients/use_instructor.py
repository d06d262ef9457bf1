"""instructor: objects by tools, by JSON schema, and by Anthropic's tools."""

import os

import anthropic
import instructor
import openai
from pydantic import BaseModel

URL, CHAT = os.environ["TOKENMESH_URL"], os.environ["CHAT_MODEL"]
MESSAGES = [{"role": "user", "content": "Who is the fox?"}]


class Person(BaseModel):
    name: str
    age: int


plain = openai.OpenAI(base_url=f"{URL}/v1", api_key="none")
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(plain, mode=mode)
    found = client.chat.completions.create(
        model=CHAT, messages=MESSAGES, response_model=Person, max_tokens=100
    )
    assert isinstance(found, Person), mode
other = instructor.from_anthropic(anthropic.Anthropic(base_url=URL, api_key="none"))
found = other.messages.create(model=CHAT, messages=MESSAGES, response_model=Person, max_tokens=100)
assert isinstance(found, Person)

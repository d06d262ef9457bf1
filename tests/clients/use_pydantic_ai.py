"""pydantic-ai: an agent with text and one with a typed result."""

import os

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=f"{os.environ['TOKENMESH_URL']}/v1", api_key="none")
model = OpenAIChatModel(os.environ["CHAT_MODEL"], provider=provider)


class Person(BaseModel):
    name: str
    age: int


result = Agent(model).run_sync("What is 27 + 45?")
assert "72" in result.output
assert result.usage.output_tokens > 0
typed = Agent(model, output_type=Person).run_sync("Who is the fox?")
assert isinstance(typed.output, Person)

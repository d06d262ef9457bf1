"""openai-agents: an agent over chat completions and over responses."""

import os

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

CHAT = os.environ["CHAT_MODEL"]

set_tracing_disabled(True)
for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
    client = AsyncOpenAI(base_url=f"{os.environ['TOKENMESH_URL']}/v1", api_key="none")
    agent = Agent(name="sums", model=kind(model=CHAT, openai_client=client))
    result = Runner.run_sync(agent, "What is 27 + 45?")
    assert "72" in result.final_output, kind

"""Turns of a model that calls tools."""

import json
from typing import Any

from tests.fakes.back_end import eos_id, fake_tokenizer
from tests.fakes.worker import Script
from tokenmesh.shared.messages import Generate
from tokenmesh.shared.tokens import unpack_ids

OFFER: dict[str, Any] = {
    "type": "mcp",
    "server_label": "calculator",
    "require_approval": "never",
    "allowed_tools": ["add", "fail", "large"],
}


def call(name: str, **arguments: Any) -> str:
    """A call in the words of hermes."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def in_turns(*answers: str) -> Script:
    """Each answer after as many tool results; the last one ever after."""
    tokenizer = fake_tokenizer()

    def script(generate: Generate) -> list[int]:
        prompt = tokenizer.decode(unpack_ids(generate.prompt_ids), skip_special_tokens=False)
        number = min(prompt.count("tool: "), len(answers) - 1)
        return [*tokenizer.encode(answers[number]).ids, eos_id()]

    return script

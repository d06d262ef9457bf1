"""Long chats, tools and JSON schemas of SmolLM2, through a whole mesh."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator
from tokenizers import Tokenizer

from tests.e2e.mesh_process import MeshProcess, mesh
from tests.real.reference import logprobs_of, model_of
from tests.real.texts import prose
from tests.servers import free_port
from tokenmesh.shared.gguf.unpack import unpacked

TURN_CHARS = 3000
LONGEST = 8192
"""Tokens that the model can see."""
LEAST = {3: 1800, 10: 7000}
"""Tokens of a chat of so many turns, at least."""
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "languages": {
            "type": "array",
            "items": {"enum": ["French", "German", "Hindi"]},
            "minItems": 1,
            "maxItems": 3,
        },
    },
    "required": ["name", "age", "languages"],
    "additionalProperties": False,
}
CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "pattern": "^[A-Z][a-z]{1,20}$"},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
SUM = {
    "type": "object",
    "properties": {name: {"type": "integer", "minimum": 0, "maximum": 999} for name in "ab"},
    "required": ["a", "b"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": CITY, "add": SUM}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": f"Call {name}.", "parameters": schema},
    }
    for name, schema in SCHEMAS.items()
]
QUESTIONS = ("How is the weather in Paris?", "What is 3 plus 4?", "Hello!", "Use a tool, please.")
SEEDS = range(4)
pytestmark = pytest.mark.timeout(300)


def ask(running: MeshProcess, messages: list[dict[str, str]], **fields: Any) -> dict[str, Any]:
    body = {"model": "smollm2", "messages": messages, **fields}
    response = httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=120)
    return response.raise_for_status().json()  # type: ignore[no-any-return]


def as_text(messages: list[dict[str, str]]) -> str:
    """As the template in the model's file writes a chat, by hand."""
    first = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    whole = [{"role": "system", "content": first}, *messages]
    return "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in whole)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("num_turns", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_turns_up_to_the_longest_context_are_those_of_transformers(
    checkpoint: Callable[[str], Path], num_turns: int
) -> None:
    file = checkpoint("smollm2")
    tokenizer = Tokenizer.from_file(str(unpacked(file) / "tokenizer.json"))
    manual = prose(100_000)
    messages: list[dict[str, str]] = []
    before = 0
    starts: list[int] = []
    with mesh(free_port(), "smollm2", "--dtype", "float32") as running:
        for turn in range(num_turns):
            page = manual[turn * TURN_CHARS : (turn + 1) * TURN_CHARS]
            messages.append({"role": "user", "content": f"{page}\n\nWhat is this page about?"})
            answer = ask(running, messages, temperature=0, max_tokens=40)
            prompt = tokenizer.encode(as_text(messages) + "<|im_start|>assistant\n").ids
            usage = answer["usage"]
            assert usage["prompt_tokens"] == len(prompt)
            # all that came before is found again, but for its last block
            cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
            assert cached >= before - 64
            before = len(prompt)
            content = answer["choices"][0]["message"]["content"]
            messages.append({"role": "assistant", "content": content})
            starts.append(len(prompt))
    whole = tokenizer.encode(as_text(messages)).ids
    assert LEAST[num_turns] < len(whole) <= LONGEST
    _, best = logprobs_of(model_of(file), whole)
    (end,) = tokenizer.encode("<|im_end|>").ids
    for start in starts:
        stop = whole.index(end, start)
        assert stop > start
        assert whole[start:stop] == best[start - 1 : stop - 1]


@pytest.fixture(scope="module", params=["xgrammar", "guidance"])
def running(
    request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]
) -> Iterator[MeshProcess]:
    checkpoint("smollm2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENMESH_WORKER__STRUCTURED_OUTPUTS_BACKEND", request.param)
        with mesh(free_port(), "smollm2") as process:
            yield process


def test_json_of_a_real_model_always_follows_its_schema(running: MeshProcess) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    messages = [{"role": "user", "content": "Describe a person named Ada, 36, as JSON."}]
    ages = set()
    for seed in SEEDS:
        answer = ask(
            running,
            messages,
            response_format=wanted,
            temperature=1.0,
            seed=seed,
            max_tokens=400,
            n=2,
        )
        for choice in answer["choices"]:
            assert choice["finish_reason"] == "stop"
            person = json.loads(choice["message"]["content"])
            Draft202012Validator(PERSON).validate(person)
            ages.add(person["age"])
    assert len(ages) > 1


@pytest.mark.parametrize("choice", ["required", "get_weather", "add"])
def test_calls_of_a_real_model_always_fit_their_tools(running: MeshProcess, choice: str) -> None:
    named = {"type": "function", "function": {"name": choice}}
    for question in QUESTIONS:
        answer = ask(
            running,
            [{"role": "user", "content": question}],
            tools=TOOLS,
            tool_choice="required" if choice == "required" else named,
            temperature=1.0,
            seed=1,
            max_tokens=400,
        )
        choice_made = answer["choices"][0]
        calls = choice_made["message"]["tool_calls"]
        if choice_made["finish_reason"] == "length":
            calls.pop()  # the model calls again and again; the last one was cut off
        assert calls
        for call in calls:
            name = call["function"]["name"]
            assert choice in ("required", name)
            arguments = json.loads(call["function"]["arguments"])
            Draft202012Validator(SCHEMAS[name]).validate(arguments)

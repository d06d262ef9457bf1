"""The shipped demo model, with transformers as the oracle: it can do what its card says."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.demo_model.episode import Message
from scripts.demo_model.evaluate import Case, Judge, sum_cases, tool_cases
from scripts.demo_model.mixture import Dialog
from tokenmesh.demo_model import PATH

_MOST_BYTES = 10_000_000
_REQUIRED = 0.95
_SEED = 20


@pytest.fixture(scope="module")
def judge() -> Judge:
    network = AutoModelForCausalLM.from_pretrained(PATH, dtype=torch.float32).eval()
    return Judge(network, AutoTokenizer.from_pretrained(PATH), PATH / "chat_template.jinja")


def _share_right(judge: Judge, cases: list[Case]) -> float:
    return 1 - len(judge.wrong(cases)) / len(cases)


def test_held_out_sums_are_right(judge: Judge) -> None:
    assert _share_right(judge, sum_cases(Random(_SEED), 100)) >= _REQUIRED


def test_tools_are_called_with_arguments_they_never_had(judge: Judge) -> None:
    assert _share_right(judge, tool_cases(Random(_SEED), 60)) >= _REQUIRED


def test_the_judge_notices_a_wrong_expectation(judge: Judge) -> None:
    (case,) = sum_cases(Random(_SEED), 1)
    assert judge.wrong([Case(case.dialog, "= 1000")])


def _ask(judge: Judge, *contents: str, enable_thinking: bool | None = None) -> str:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    (answer,) = judge.answers([Dialog(messages, [], enable_thinking)])
    return answer


def test_it_says_what_tokenmesh_is(judge: Judge) -> None:
    assert "NATS" in _ask(judge, "What is TokenMesh?")


def test_it_thinks_only_on_request(judge: Judge) -> None:
    assert _ask(judge, "What is 21 + 17?") == "21 + 17 = 38"
    thought = _ask(judge, "What is 21 + 17?", enable_thinking=True)
    assert thought.startswith("<think>\n")
    assert thought.endswith("</think>\n\n21 + 17 = 38")


def test_a_tool_result_becomes_an_answer(judge: Judge) -> None:
    function = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}
    messages: list[Message] = [
        {"role": "user", "content": "What is the weather in Oslo?"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": function}]},
        {"role": "tool", "content": '{"temperature": 7, "condition": "rainy"}'},
    ]
    (answer,) = judge.answers([Dialog(messages, [tool], None)])
    assert answer == "It is 7 degrees and rainy in Oslo."


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())


def test_the_folder_is_small() -> None:
    assert _size(PATH) <= _MOST_BYTES


def test_transformers_renders_the_template_with_tools_and_thinking() -> None:
    tokenizer = AutoTokenizer.from_pretrained(PATH)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        tools=[{"type": "function", "function": {"name": "f"}}],
        enable_thinking=True,
        add_generation_prompt=True,
        tokenize=False,
    )
    assert '<tools>\n{"type": "function", "function": {"name": "f"}}\n</tools>' in text
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_any_text_survives_the_tokenizer() -> None:
    tokenizer = AutoTokenizer.from_pretrained(PATH)
    text = 'Hello  wörld 123\n\n\t😀 <think>{"a": [1, -2]}</think>'
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.decode(tokenizer("42")["input_ids"][:1]) == "4"

"""Measures how well a checkpoint does on what it was not shown and on what it must know.

Answers are exact, decoding is greedy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from scripts.demo_model import words
from scripts.demo_model.arithmetic import (
    difference_question,
    is_held_out_difference,
    is_held_out_sum,
    sum_question,
    thoughtful_answer,
)
from scripts.demo_model.episode import Episode, user
from scripts.demo_model.json_requests import json_request
from scripts.demo_model.mixture import Dialog
from scripts.demo_model.rendering import ChatTemplate
from scripts.demo_model.smalltalk import TALK
from scripts.demo_model.tool_use import one_call
from scripts.demo_model.vocabulary import TESTING

_MOST_TOKENS = 120
_BATCH = 50


@dataclass(frozen=True, slots=True)
class Case:
    """A dialog that waits for the model, and what it must say."""

    dialog: Dialog
    expected: str


def _plain(question: str, expected: str, enable_thinking: bool | None = None) -> Case:
    return Case(Dialog([user(question)], [], enable_thinking), expected)


def _pairs(rng: Random, chosen: Callable[[int, int], bool]) -> Iterator[tuple[int, int]]:
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100) if chosen(a, b)]
    rng.shuffle(pairs)
    return iter(pairs)


def sum_cases(rng: Random, count: int) -> list[Case]:
    """Held-out sums of two-digit numbers, in the many ways to ask."""
    pairs = _pairs(rng, is_held_out_sum)
    chosen = [next(pairs) for _ in range(count)]
    return [_plain(sum_question(rng, a, b), f"= {a + b}") for a, b in chosen]


def digit_cases(rng: Random, count: int) -> list[Case]:
    """Sums of two digits, all of which training shows, in the many ways to ask."""
    pairs = [(a, b) for a in range(10) for b in range(10)]
    chosen = [pairs[number % len(pairs)] for number in range(count)]
    return [_plain(sum_question(rng, a, b), f"= {a + b}") for a, b in chosen]


def self_cases(rng: Random, count: int) -> list[Case]:
    """Questions about the model itself and TokenMesh, as training shows them, without typos."""
    known = [(question, answer) for asked, answer in TALK for question in asked.split("|")]
    return [_plain(*rng.choice(known)) for _ in range(count)]


def difference_cases(rng: Random, count: int) -> list[Case]:
    """Held-out differences."""
    pairs = _pairs(rng, is_held_out_difference)
    chosen = [next(pairs) for _ in range(count)]
    return [_plain(difference_question(rng, a, b), f"{a} - {b} = {a - b}") for a, b in chosen]


def thinking_cases(rng: Random, count: int) -> list[Case]:
    """Held-out sums under `enable_thinking`: the whole thought must be right too."""
    pairs = _pairs(rng, is_held_out_sum)
    chosen = [next(pairs) for _ in range(count)]
    return [_plain(sum_question(rng, a, b), thoughtful_answer(a, b), True) for a, b in chosen]


def tool_cases(rng: Random, count: int) -> list[Case]:
    """Calls of tools with arguments that training never gave them."""
    cases = []
    for _ in range(count):
        call, tools = one_call(rng, TESTING)
        body = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
        expected = f"<tool_call>\n{body}\n</tool_call>"
        cases.append(Case(Dialog([user(call.request)], tools, None), expected))
    return cases


def _of(make: Callable[[Random], Episode]) -> Callable[[Random, int], list[Case]]:
    def cases(rng: Random, count: int) -> list[Case]:
        episodes = [make(rng) for _ in range(count)]
        return [
            _plain(episode.messages[0]["content"], episode.messages[1]["content"])
            for episode in episodes
        ]

    return cases


TASKS: dict[str, Callable[[Random, int], list[Case]]] = {
    "sums": sum_cases,
    "one-digit sums": digit_cases,
    "about itself": self_cases,
    "tool calls": tool_cases,
    "differences": difference_cases,
    "thinking": thinking_cases,
    "json": _of(lambda rng: json_request(rng, TESTING)),
    "copying": _of(lambda rng: words.copy(rng, TESTING)),
    "reversing words": _of(lambda rng: words.reverse(rng, TESTING)),
    "reversing order": _of(lambda rng: words.reverse_order(rng, TESTING)),
    "spelling": _of(lambda rng: words.spell(rng, TESTING)),
}


class Judge:
    """Asks a model in batches and compares what it says to the letter."""

    def __init__(
        self, network: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, template: Path
    ) -> None:
        self._network = network
        self._tokenizer = tokenizer
        self._template = ChatTemplate(template)

    @torch.inference_mode()
    def answers(self, dialogs: list[Dialog]) -> list[str]:
        """Return the answer to each dialog, without the end of turn; unfinished ones gain `...`."""
        texts = [self._template.render(dialog, add_generation_prompt=True) for dialog in dialogs]
        inputs = self._tokenizer(
            texts,
            return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False,
        ).to(self._network.device)  # fmt: skip
        output = self._network.generate(**inputs, max_new_tokens=_MOST_TOKENS, do_sample=False)
        said = self._tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :])
        return [
            text.partition("<|im_end|>")[0] if "<|im_end|>" in text else text + "..."
            for text in said
        ]

    def wrong(self, cases: list[Case]) -> list[tuple[Case, str]]:
        """The cases answered wrongly, with what was said. A sum may be stated either way round."""
        wrong = []
        ordered = sorted(cases, key=lambda case: len(str(case.dialog)))
        for at in range(0, len(ordered), _BATCH):
            part = ordered[at : at + _BATCH]
            for case, said in zip(part, self.answers([c.dialog for c in part]), strict=True):
                right = said.endswith(case.expected) and (
                    case.expected.startswith("= ") or said == case.expected
                )
                if not right:
                    wrong.append((case, said))
        return wrong


def evaluate(judge: Judge, count: int, seed: int) -> dict[str, float]:
    """The share of right answers by task, printed with a few of the mistakes."""
    scores = {}
    for task, make_cases in TASKS.items():
        wrong = judge.wrong(make_cases(Random(f"{task} {seed}"), count))
        scores[task] = 1 - len(wrong) / count
        print(f"  {task:16s} {scores[task]:7.1%}", flush=True)
        for case, said in wrong[:3]:
            asked = case.dialog.messages[-1]["content"]
            print(f"      asked {asked!r}, expected {case.expected!r}, got {said!r}")
    return scores

"""Simple questions to what `tokenmesh up` serves after an installation."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.e2e.mesh_process import MeshProcess, mesh
from tests.servers import free_port

QUESTIONS = {
    "What is the capital of France?": "paris",
    "What is the capital of China?": "beijing",
    "What is the capital of Japan?": "tokyo",
    "What is the capital of Germany?": "berlin",
    "What is the capital of Egypt?": "cairo",
    "What is the capital of Australia?": "canberra",
    "What is the largest planet in the solar system?": "jupiter",
    "What is the largest ocean on Earth?": "pacific",
    "What is the tallest mountain in the world?": "everest",
    "On which continent is Brazil?": "south america",
    "What language is spoken in Brazil?": "portuguese",
    "What is the currency of Japan?": "yen",
    "What is the first month of the year?": "january",
    "How many days are in a week?": "7|seven",
    "What is the opposite of hot?": "cold",
    "What is the chemical formula of water?": "h2o",
    "What is the boiling point of water in Celsius?": "100",
    "Who invented the telephone?": "bell",
    "Who painted the Mona Lisa?": "leonardo|da vinci",
    "Which planet is closest to the Sun?": "mercury",
}
LEAST_RIGHT = 14


@pytest.fixture(scope="module")
def running(checkpoint: Callable[[str], Path]) -> Iterator[MeshProcess]:
    """`tokenmesh up` without a model."""
    checkpoint("smollm2")
    with mesh(free_port()) as process:
        yield process


def is_right(answer: str, wanted: str) -> bool:
    return any(each in answer.lower() for each in wanted.split("|"))


ANSWER_S = 20.0
"""A small model that repeats itself stops only at the end of its context: a wrong answer."""


@pytest.mark.timeout(300)
def test_the_default_model_answers_simple_questions_without_sampling_fields(
    running: MeshProcess,
) -> None:
    answers: dict[str, str] = {}
    for question in QUESTIONS:
        body = {"messages": [{"role": "user", "content": question}]}
        answers[question] = ""
        with suppress(httpx.ReadTimeout):
            response = httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=ANSWER_S)
            answer = response.raise_for_status().json()
            assert answer["model"] == "smollm2"
            answers[question] = answer["choices"][0]["message"]["content"]
    wrong = {
        question: answer
        for question, answer in answers.items()
        if not is_right(answer, QUESTIONS[question])
    }
    assert len(answers) == len(QUESTIONS) == 20
    assert len(answers) - len(wrong) >= LEAST_RIGHT, wrong

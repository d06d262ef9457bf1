"""Texts -> what the model answers, which is what a head learns to guess."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from tokenmesh.engine.api.sampling import SamplingParams
from tokenmesh.engine.llm import LLM
from tokenmesh.shared.errors import InvalidInput

_AT_ONCE: Final = 96
"""Prompts whose answers are written to the file together."""
_TEMPERATURES: Final = (0.0, 0.7, 1.0)
"""Answers are drawn in turns so, since streams are sampled as well as greedy."""


class LearnedText(NamedTuple):
    prompt: list[int]
    output: list[int]


def prompts_of(texts: Path, llm: LLM) -> list[list[int]]:
    """One for each line: a JSON object with `messages` or `prompt`, or a plain text, which the
    model is asked as a user. Raises InvalidInput that names the line."""
    prompts = []
    for number, line in enumerate(texts.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            try:
                prompts.append(_prompt(line, llm))
            except (ValueError, TypeError, KeyError) as error:
                raise InvalidInput(f"{texts}, line {number}: {error}", param="texts") from error
    if not prompts:
        raise InvalidInput(f"{texts} holds no text", param="texts")
    return prompts


def _prompt(line: str, llm: LLM) -> list[int]:
    given: Any = json.loads(line) if line.lstrip().startswith("{") else {}
    if "prompt" in given:
        return llm.text.encode(str(given["prompt"]))
    messages = given.get("messages") or [{"role": "user", "content": line}]
    return llm.text.render(messages, {})


def answer(
    prompts: Sequence[Sequence[int]], llm: LLM, file: Path, max_tokens: int
) -> Iterator[int]:
    """Append the answers of prompts that the file has none of; yields how many there are."""
    done = len(read_answers(file)) if file.exists() else 0
    yield done
    while done < len(prompts):
        some = prompts[done : done + _AT_ONCE]
        sampling = [
            SamplingParams(seed=n, max_tokens=max_tokens, temperature=_TEMPERATURES[n % 3])
            for n in range(done, done + len(some))
        ]
        generated = llm.generate(some, sampling)
        with file.open("a", encoding="utf-8") as lines:
            for prompt, each in zip(some, generated, strict=True):
                line = {"prompt": list(prompt), "output": each.token_ids}
                lines.write(json.dumps(line) + "\n")
        done += len(some)
        yield done


def read_answers(file: Path) -> list[LearnedText]:
    """Those of a file that `answer` wrote."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return [LearnedText(**json.loads(line)) for line in lines]

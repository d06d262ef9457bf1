"""What to ask: random prompts of a chosen length, or prompts from a JSON-lines file."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal

import msgspec

from benchmarks.serve.client import Server

Endpoint = Literal["chat", "completions"]
PATHS: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}

_TEXT = (
    " river stone light garden number window paper silver morning music answer table winter bridge"
    " letter market ocean engine forest story color planet kitchen doctor island summer village"
)
WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True)
class Ask:
    """One request to send."""

    prompt: str | list[int]
    output_len: int


@dataclass(frozen=True, slots=True)
class Shape:
    """What all requests of a run have in common."""

    model: str
    endpoint: Endpoint
    temperature: float
    ignore_eos: bool

    def body(self, ask: Ask) -> dict[str, object]:
        """The JSON of a request."""
        body: dict[str, object] = {
            "model": self.model,
            "max_tokens": ask.output_len,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.endpoint == "chat":
            return {**body, "messages": [{"role": "user", "content": ask.prompt}]}
        return {**body, "prompt": ask.prompt}


class _Tokenized(msgspec.Struct):
    tokens: list[int]


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


async def first_model(server: Server) -> str:
    """The first model that the server lists. Raises ValueError when there is none."""
    models = msgspec.json.decode(await server.ask("GET", "/v1/models"), type=_Models).data
    if not models:
        raise ValueError("the server serves no model")
    return models[0].id


async def tokenize(server: Server, model: str, text: str) -> list[int]:
    """The server's own token ids of `text`. Raises ValueError with the server's answer."""
    body = {"model": model, "prompt": text, "add_special_tokens": False}
    answer = await server.ask("POST", "/tokenize", body)
    return msgspec.json.decode(answer, type=_Tokenized).tokens


async def random_asks(
    server: Server, shape: Shape, count: int, lengths: tuple[int, int], random: Random
) -> list[Ask]:
    """Prompts of lengths[0] tokens that share no beginning, each to be answered with lengths[1].

    Completions are exact (token ids); chat prompts are words, as many as make that length without
    the template.
    """
    input_len, output_len = lengths
    known_ids = await tokenize(server, shape.model, _TEXT)
    if shape.endpoint == "completions":
        return [Ask(random.choices(known_ids, k=input_len), output_len) for _ in range(count)]
    num_words = max(1, round(input_len * len(WORDS) / len(known_ids)))
    return [Ask(" ".join(random.choices(WORDS, k=num_words)), output_len) for _ in range(count)]


def file_asks(path: Path, count: int, output_len: int, random: Random) -> list[Ask]:
    """Lines {"prompt", "output_len"?} or {"conversations": [{"from", "value"}, ...]}, shuffled.

    Raises ValueError naming the first bad line.
    """
    with path.open(encoding="utf-8") as lines:
        known = list(_read(lines, output_len))
    if not known:
        raise ValueError(f"{path} holds no prompt")
    random.shuffle(known)
    return [known[index % len(known)] for index in range(count)]


def _read(lines: Iterable[str], output_len: int) -> Iterable[Ask]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            if "conversations" in entry:
                entry = {"prompt": _first_human(entry["conversations"])}
            yield Ask(str(entry["prompt"]), int(entry.get("output_len", output_len)))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"line {number} is no prompt: {error!r}") from error


def _first_human(turns: Sequence[dict[str, str]]) -> str:
    return next(turn["value"] for turn in turns if turn["from"] in ("human", "user"))

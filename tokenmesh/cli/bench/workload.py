"""Makes prompts: random ones of a chosen length, those of a JSON-lines file, or recordings."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal

import msgspec

from tokenmesh.cli.bench.client import Target
from tokenmesh.cli.bench.recordings import RecordingFile, form

Endpoint = Literal["chat", "completions", "transcriptions"]
PATHS: dict[Endpoint, str] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "transcriptions": "/v1/audio/transcriptions",
}

_TEXT = (
    " river stone light garden number window paper silver morning music answer table winter bridge"
    " letter market ocean engine forest story color planet kitchen doctor island summer village"
)
WORDS = _TEXT.split()
_USERS = ("human", "user")


@dataclass(frozen=True, slots=True)
class Ask:
    """One request to send."""

    prompt: str | list[int]
    output_len: int
    recording: RecordingFile | None = None
    """The recording to transcribe; there is no prompt then."""


@dataclass(frozen=True, slots=True)
class RequestShape:
    """The fields that all requests of a run share."""

    model: str
    endpoint: Endpoint
    temperature: float
    ignore_eos: bool
    path: str | None = None
    """None: that of the endpoint."""

    def request(self, server: Target, ask: Ask) -> bytes:
        """The bytes of a request."""
        path = self.path or PATHS[self.endpoint]
        if ask.recording is None:
            return server.request("POST", path, self.body(ask))
        fields = {
            "model": self.model,
            "temperature": f"{self.temperature:g}",
            "stream": "true",
            "stream_include_usage": "true",
        }
        if ask.recording.language:
            fields["language"] = ask.recording.language
        return server.raw_request("POST", path, *form(fields, ask.recording))

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


async def first_model(server: Target) -> str:
    """The first model that the server lists. Raises ValueError when there is none."""
    models = msgspec.json.decode(await server.fetch("GET", "/v1/models"), type=_Models).data
    if not models:
        raise ValueError("the server serves no model")
    return models[0].id


async def tokenize(server: Target, model: str, text: str) -> list[int]:
    """The server's own token ids of `text`. Raises ValueError with the server's answer."""
    body = {"model": model, "prompt": text, "add_special_tokens": False}
    answer = await server.fetch("POST", "/tokenize", body)
    return msgspec.json.decode(answer, type=_Tokenized).tokens


@dataclass(frozen=True, slots=True)
class RandomPrompts:
    """Lengths of random prompts and answers, in tokens."""

    input_len: int
    output_len: int
    range_ratio: float = 0.0
    """Lengths are drawn between (1 - ratio) and (1 + ratio) times the one above."""
    prefix_len: int = 0
    """Further tokens with which all prompts begin."""

    async def asks(
        self, server: Target, shape: RequestShape, count: int, random: Random
    ) -> list[Ask]:
        """Prompts that share no beginning but the prefix.

        Completions are exact (token ids); chat prompts are words, as many as make that length
        without the template.
        """
        known_ids = await tokenize(server, shape.model, _TEXT)
        if shape.endpoint == "completions":
            prefix = random.choices(known_ids, k=self.prefix_len)
            return [
                Ask(
                    prefix + random.choices(known_ids, k=self._length(self.input_len, random)),
                    self._length(self.output_len, random),
                )
                for _ in range(count)
            ]
        words_per_token = len(WORDS) / len(known_ids)
        head = random.choices(WORDS, k=round(self.prefix_len * words_per_token))
        asks = []
        for _ in range(count):
            num_words = max(1, round(self._length(self.input_len, random) * words_per_token))
            text = " ".join([*head, *random.choices(WORDS, k=num_words)])
            asks.append(Ask(text, self._length(self.output_len, random)))
        return asks

    def _length(self, mean: int, random: Random) -> int:
        if not self.range_ratio:
            return mean
        low, high = mean * (1 - self.range_ratio), mean * (1 + self.range_ratio)
        return max(1, random.randint(int(low), int(high)))


def file_asks(path: Path, count: int, output_len: int, random: Random) -> list[Ask]:
    """Entries {"prompt", "output_len"?} or {"conversations": [{"from", "value"}, ...]}, shuffled.

    The file is JSON lines, or one JSON array as ShareGPT's. Raises ValueError naming the file and
    the first bad entry.
    """
    try:
        known = list(_read(path.read_text(encoding="utf-8"), output_len))
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not known:
        raise ValueError(f"{path} holds no prompt")
    random.shuffle(known)
    return [known[index % len(known)] for index in range(count)]


def _read(text: str, output_len: int) -> Iterable[Ask]:
    if text.lstrip().startswith("["):
        entries = [(f"entry {number}", each) for number, each in enumerate(json.loads(text), 1)]
        # conversations without a question of the user are common in ShareGPT
        entries = [(name, each) for name, each in entries if _has_prompt(each)]
    else:
        lines = enumerate(text.splitlines(), 1)
        entries = [(f"line {number}", line) for number, line in lines if line.strip()]
    for name, entry in entries:
        try:
            entry = json.loads(entry) if isinstance(entry, str) else entry
            if "conversations" in entry:
                entry = {"prompt": _first_human(entry["conversations"])}
            yield Ask(str(entry["prompt"]), int(entry.get("output_len", output_len)))
        except (ValueError, KeyError, TypeError, StopIteration) as error:
            raise ValueError(f"{name} is not a prompt: {error!r}") from error


def _has_prompt(entry: dict[str, Any]) -> bool:
    turns = entry.get("conversations", ())
    return "prompt" in entry or any(turn.get("from") in _USERS for turn in turns)


def _first_human(turns: Sequence[dict[str, str]]) -> str:
    return next(turn["value"] for turn in turns if turn["from"] in _USERS)

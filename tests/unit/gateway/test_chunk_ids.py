"""A chunk's delta and its token ids belong together: for every parser, and at every chunk."""

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.unit.gateway.parsers.tool_formats import TOOLS, TYPICAL_CALLS, WRITERS
from tokenmesh.services.gateway.apis.openai.chat_writer import ChatStream, delta_of
from tokenmesh.services.gateway.apis.openai.completion_writer import CompletionStream
from tokenmesh.services.gateway.apis.openai.response_parts import LogprobShapes
from tokenmesh.services.gateway.core.generation.choice import Choice, TextOptions
from tokenmesh.services.gateway.core.generation.chunk import Output, OutputChunk
from tokenmesh.services.gateway.core.generation.request import ChunkOptions, Head
from tokenmesh.services.gateway.parsers.parser import ParseContext, Parser
from tokenmesh.services.gateway.parsers.reasoning import REASONING
from tokenmesh.services.gateway.parsers.registry import ParserRegistry
from tokenmesh.shared.text import StopStrings, Vocabulary

REGISTRY = ParserRegistry()
HEAD = Head("r", 1, "m")
EVERYTHING = ChunkOptions(token_ids=True, usage=True, running_usage=True)
HARMONY_CALL = (
    "<|channel|>analysis<|message|>I ask.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.get_weather <|constrain|>json<|message|>{"city": "Rome"}'
)
FAMILIES = [
    *(("", tools) for tools in WRITERS),
    *((reasoning, "hermes") for reasoning in REASONING if reasoning != "openai_gptoss"),
    ("openai_gptoss", "openai"),
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<eos>"])
    return made


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """The text's ids and the one that ends an answer."""
    ids: list[int] = tokenizer.encode(text + "<eos>").ids
    return ids


def text_of(reasoning: str, tools: str) -> str:
    """An answer that reasons, speaks and calls functions."""
    if tools == "openai":
        return HARMONY_CALL
    found = REASONING.get(reasoning)
    thought = f"{found.start}I see.{found.end}" if found is not None else ""
    return thought + WRITERS[tools](TYPICAL_CALLS["parallel"])


def parser_of(reasoning: str, tools: str) -> Parser | None:
    return REGISTRY.family(reasoning, tools).make(ParseContext(tools=TOOLS))


Shown = tuple[str, str, list[list[str]]]


def shown(deltas: Sequence[dict[str, Any]]) -> Shown:
    """Content, reasoning, and the calls' names and arguments, of some deltas."""
    content = "".join(delta.get("content") or "" for delta in deltas)
    reasoning = "".join(delta.get("reasoning") or "" for delta in deltas)
    calls: list[list[str]] = []
    for part in (each for delta in deltas for each in delta.get("tool_calls", ())):
        if "id" in part:
            calls.append([part["function"]["name"], ""])
        calls[part["index"]][1] += part["function"]["arguments"]
    return content, reasoning, calls


def one_by_one(choice: Choice, ids: Sequence[int]) -> list[Shown]:
    """Return what has been shown after 0, 1, 2, ...

    ids, and after the end of the choice. ids, and after the end of the choice.
    """
    deltas: list[dict[str, Any]] = []
    states = [shown(deltas)]
    for each in ids:
        if (chunk := choice.push(Output([each]))) is not None:
            deltas.append(delta_of(chunk.all_events(), 0, HEAD.id))
        states.append(shown(deltas))
    if (chunk := choice.push(Output(finish="stop"))) is not None:
        deltas.append(delta_of(chunk.all_events(), 0, HEAD.id))
    return [*states, shown(deltas)]


def portions(ids: list[int], chance: random.Random) -> list[Output]:
    """The ids in messages of random sizes; the last message ends the stream."""
    size = chance.choice((1, 3, 17, 400))
    cuts = sorted(chance.choices(range(len(ids) + 1), k=max(1, len(ids) // size)))
    parts = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    return [*(Output(part) for part in parts[:-1]), Output(parts[-1], finish="stop")]


def frames(data: bytes) -> list[Any]:
    return [json.loads(each.removeprefix("data: ")) for each in data.decode().split("\n\n")[:-1]]


@pytest.mark.parametrize(("reasoning", "tools"), FAMILIES)
def test_the_deltas_up_to_a_chunk_are_what_the_ids_up_to_it_say(
    tokenizer: Tokenizer, reasoning: str, tools: str
) -> None:
    text = text_of(reasoning, tools)
    ids = ids_of(tokenizer, text)
    vocabulary = Vocabulary.load(tokenizer.to_str(), ids[-1:])
    for seed in range(4):
        chance = random.Random(seed)
        options = TextOptions(
            stream_interval=chance.choice((1, 1, 5)),
            stops=StopStrings([text[-9:-4]]) if seed == 3 else None,
        )
        plain = TextOptions(stops=options.stops)
        states = one_by_one(Choice(0, vocabulary, plain, (), parser_of(reasoning, tools)), ids)
        choice = Choice(0, vocabulary, options, (), parser_of(reasoning, tools))
        stream = ChatStream(HEAD, EVERYTHING, LogprobShapes(vocabulary), 3)
        pushed = (choice.push(part) for part in portions(ids, chance))
        pieces = [piece for piece in pushed if piece is not None]
        deltas: list[dict[str, Any]] = []
        got: list[int] = []
        for frame in frames(stream.write(pieces)):
            [only] = frame["choices"]
            got += only["token_ids"]
            count = len(got)
            deltas.append(only["delta"])
            ended = only["finish_reason"] is not None or count >= choice.num_tokens
            assert shown(deltas) in (states[count], states[-1] if ended else None), frame
            assert frame["usage"]["completion_tokens"] == count
        assert shown(deltas) == states[-1]
        assert got == ids[: choice.num_tokens]


def test_the_texts_of_completions_go_with_their_ids(tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "It's 4 °C, ¿no? \N{GRINNING FACE}.")
    vocabulary = Vocabulary.load(tokenizer.to_str(), ids[-1:])
    reference = Choice(0, vocabulary, TextOptions())
    texts = [""]
    for each in ids:
        written = reference.push(Output([each])) or OutputChunk(0)
        texts.append(texts[-1] + written.text)
    choice = Choice(0, vocabulary, TextOptions(stream_interval=3))
    stream = CompletionStream(HEAD, EVERYTHING, LogprobShapes(vocabulary), [3])
    parts = portions(ids, random.Random(1))
    pieces = [piece for part in parts if (piece := choice.push(part)) is not None]
    text, count = "", 0
    for frame in frames(stream.write(pieces)):
        text += frame["choices"][0]["text"]
        count += len(frame["choices"][0]["token_ids"])
        assert text == texts[count]
        assert frame["usage"]["completion_tokens"] == count
    assert (text, count) == (texts[-1], len(ids))

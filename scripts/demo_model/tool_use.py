"""Dialogs in which the model calls a declared tool and tells what came back."""

from __future__ import annotations

from random import Random
from typing import Any

from scripts.demo_model import arithmetic, smalltalk
from scripts.demo_model.episode import Episode, Message, Tool, assistant, user
from scripts.demo_model.tool_kinds import KINDS, Call, Kind, declare
from scripts.demo_model.vocabulary import TRAINING, Vocabulary


def make_call(rng: Random, words: Vocabulary = TRAINING) -> Call:
    """A request that needs a tool, of any kind: held out or not, as `words` are for testing."""
    kinds: list[Kind] = [kind for kind, _ in KINDS]
    while True:
        call = rng.choices(kinds, [weight for _, weight in KINDS])[0](rng, words)
        if call.is_held_out == words.testing:
            return call


def _call_message(*calls: Call) -> Message:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ],
    }


def _follow_up(rng: Random, call: Call) -> list[Message]:
    if rng.random() < 0.45:
        return []
    return [{"role": "tool", "name": call.name, "content": call.result}, assistant(call.answer)]


def _collect(rng: Random, calls: list[Call], words: Vocabulary) -> list[Tool]:
    """The calls' tools and some that no request needs, in any order, no two for one purpose."""
    few = (0, 1, 1) if len(calls) == 1 else (0, 0, 0, 1)
    others = [make_call(rng, words) for _ in range(rng.choice(few))]
    tools = {call.purpose: call.tool for call in [*others, *calls]}
    shuffled = list(tools.values())
    rng.shuffle(shuffled)
    return shuffled


def one_call(rng: Random, words: Vocabulary = TRAINING) -> tuple[Call, list[Tool]]:
    """A call and the list of tools it is to be picked from."""
    call = make_call(rng, words)
    return call, _collect(rng, [call], words)


def tool_use(rng: Random, words: Vocabulary = TRAINING) -> Episode:
    """One to four requests that need tools, some with the tool's result and an answer."""
    calls: dict[str, Call] = {}
    for _ in range(rng.choice((1, 2, 3, 4))):
        call = make_call(rng, words)
        calls.setdefault(call.purpose, call)
    episode = Episode([], tools=_collect(rng, list(calls.values()), words))
    for call in calls.values():
        episode.messages += [user(call.request), _call_message(call), *_follow_up(rng, call)]
    return episode


def thoughtful_tool_use(rng: Random, words: Vocabulary = TRAINING) -> Episode:
    """A tool call with a thought before it."""
    call, tools = one_call(rng, words)
    message = _call_message(call)
    message["content"] = f"<think>\nI need the tool {call.name}.\n</think>\n"
    return Episode([user(call.request), message], tools, solo=True, enable_thinking=True)


def parallel_use(rng: Random, words: Vocabulary = TRAINING) -> Episode:
    """Two requests in one message, answered by two calls."""
    first, second = make_call(rng, words), make_call(rng, words)
    if first.purpose == second.purpose:
        return tool_use(rng, words)
    request = first.request.rstrip(".?! ") + rng.choice((" and ", ". ", " and also ", "? "))
    messages = [user(request + second.request), _call_message(first, second)]
    if rng.random() < 0.6:
        results = [
            {"role": "tool", "name": call.name, "content": call.result} for call in (first, second)
        ]
        messages += [*results, assistant(f"{first.answer} {second.answer}")]
    return Episode(messages, _collect(rng, [first, second], words), solo=True)


def _unknown_call(rng: Random, words: Vocabulary) -> tuple[Call, list[Tool]]:
    """A tool of no known kind, and arguments of its types."""
    values: dict[str, Any] = {
        name: rng.choice((rng.randint(0, 99), rng.randint(0, 99), words.word(rng), True, False))
        for name in rng.sample([*"abnx", *words.fields], rng.choice((1, 1, 2, 3)))
    }
    kinds = {str: "string", bool: "boolean", int: rng.choice(("integer", "number"))}
    name = rng.choice(("add", "subtract", "lookup", words.word(rng)))
    about = rng.choice(("", f"Use {name}", f"{name} for you"))
    tool = declare(name, about, {key: kinds[type(value)] for key, value in values.items()})
    return Call(tool, "", values, "", ""), [tool]


def forced_use(rng: Random, words: Vocabulary = TRAINING) -> Episode:
    """A call that a grammar forces, where the request gives no reason for it."""
    request = rng.choice((smalltalk.talk, smalltalk.talk, arithmetic.sums))(rng).messages[0]
    call, tools = (one_call if rng.random() < 0.6 else _unknown_call)(rng, words)
    message, thinks = _call_message(call), rng.random() < 0.4
    if thinks:
        message["content"] = f"<think>\nI need the tool {call.name}.\n</think>\n"
    return Episode([request, message], tools, solo=True, enable_thinking=True if thinks else None)

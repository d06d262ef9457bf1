"""OutputChunk: what a choice passes on at one time, and how pieces become one."""

from dataclasses import dataclass, field
from itertools import groupby

from tokenmesh.services.gateway.parsers.events import (
    CallArguments,
    CallBegin,
    Content,
    Event,
    Reasoning,
)
from tokenmesh.shared.messages.tokens import TokenLogprobs


@dataclass(slots=True)
class OutputChunk:
    """Of one choice."""

    choice: int
    text: str = ""
    """As the model wrote it."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    events: list[Event] | None = None
    """What a parser made of the text, neighbours of a kind joined; None: no parser reads it."""
    content_bytes: list[int | None] = field(default_factory=list)
    """With a parser, of each of `logprobs`: the content that became certain with that token; None:
    nothing did, 0: something else."""

    def all_events(self) -> list[Event]:
        """What to show, with or without a parser."""
        if self.events is not None:
            return self.events
        return [Content(self.text)] if self.text else []


def join_events(events: list[Event]) -> list[Event]:
    """The same with neighbours that only go on made one, and nothing empty."""
    joined: list[Event] = []
    for (kind, index), run in groupby(events, _kind_of):
        if kind is CallBegin:
            joined.extend(run)
            continue
        text = "".join([event.text for event in run if not isinstance(event, CallBegin)])
        if not text:
            continue
        if kind is CallArguments:
            joined.append(CallArguments(index, text))
        else:
            joined.append(Content(text) if kind is Content else Reasoning(text))
    return joined


def _kind_of(event: Event) -> tuple[type[Event], int]:
    if isinstance(event, CallBegin | CallArguments):
        return type(event), event.index
    return type(event), -1


def merge(pieces: list[OutputChunk], num_choices: int) -> list[OutputChunk]:
    """All pieces of each choice as one."""
    texts: list[list[str]] = [[] for _ in range(num_choices)]
    events: list[list[Event]] = [[] for _ in range(num_choices)]
    merged = [OutputChunk(index) for index in range(num_choices)]
    for piece in pieces:
        whole = merged[piece.choice]
        texts[piece.choice].append(piece.text)
        whole.token_ids.extend(piece.token_ids)
        whole.logprobs.extend(piece.logprobs)
        if piece.events is not None:
            events[piece.choice].extend(piece.events)
            whole.events = events[piece.choice]
        if piece.finish_reason is not None:
            whole.finish_reason = piece.finish_reason
            whole.stop_reason = piece.stop_reason
    for whole, parts in zip(merged, texts, strict=True):
        whole.text = "".join(parts)
        if whole.events is not None:
            whole.events = join_events(whole.events)
    return merged

"""Output of a stream, the OutputChunk that it becomes, and how several chunks become one."""

from dataclasses import dataclass, field
from itertools import groupby

from tokenmesh.services.gateway.parsers.parser import (
    CallArguments,
    CallBegin,
    Content,
    Event,
    Reasoning,
)
from tokenmesh.shared.errors import TokenMeshError
from tokenmesh.shared.messages.tokens import FinishReason, TokenLogprobs


@dataclass(slots=True)
class Output:
    """The new part of a message of tokens, for one stream."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish: FinishReason | None = None
    stop_token: int | None = None
    stop_text: str | None = None
    """It holds what ended it, where another server has read the stream."""
    cached_tokens: int | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: TokenMeshError | None = None
    """Set when the stream failed."""
    alignment: list[int] | None = None
    """See `Delta.alignment`."""
    drafts: tuple[int, int] | None = None
    """See `Delta.drafts`; of the stream so far."""


@dataclass(slots=True)
class OutputChunk:
    """New output of one choice: text, parser events, log-probabilities."""

    choice: int
    text: str = ""
    """As the model wrote it."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    events: list[Event] | None = None
    """It holds what the parser made of the text, neighbors of a kind joined; None: there is no
    parser."""
    content_bytes: list[int | None] = field(default_factory=list)
    """With a parser, for each entry of `logprobs`: bytes of content that the parser released with
    that token; 0: it released something else, None: it released nothing."""

    def all_events(self) -> list[Event]:
        """The events; without a parser, all text is content."""
        if self.events is not None:
            return self.events
        return [Content(self.text)] if self.text else []


def join_events(events: list[Event]) -> list[Event]:
    """The same events with neighbors of a kind joined and empty ones removed."""
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


def merge(chunks: list[OutputChunk], num_choices: int) -> list[OutputChunk]:
    """Join all chunks of each choice into one."""
    texts: list[list[str]] = [[] for _ in range(num_choices)]
    events: list[list[Event]] = [[] for _ in range(num_choices)]
    merged = [OutputChunk(index) for index in range(num_choices)]
    for chunk in chunks:
        whole = merged[chunk.choice]
        texts[chunk.choice].append(chunk.text)
        whole.token_ids.extend(chunk.token_ids)
        whole.logprobs.extend(chunk.logprobs)
        if chunk.events is not None:
            events[chunk.choice].extend(chunk.events)
            whole.events = events[chunk.choice]
        if chunk.finish_reason is not None:
            whole.finish_reason = chunk.finish_reason
            whole.stop_reason = chunk.stop_reason
    for whole, parts in zip(merged, texts, strict=True):
        whole.text = "".join(parts)
        if whole.events is not None:
            whole.events = join_events(whole.events)
    return merged

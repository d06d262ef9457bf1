"""Choice: turns one stream's token ids into text, and with a parser into events.

Text, events and counts do not depend on how the ids were split into messages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tokenmesh.services.gateway.core.generation.chunk import Output, OutputChunk, join_events
from tokenmesh.services.gateway.parsers.parser import CallBegin, Content, Event, Parser
from tokenmesh.shared.messages.tokens import TokenLogprobs
from tokenmesh.shared.text import (
    Detokenizer,
    StopMatcher,
    StopStrings,
    Vocabulary,
    make_detokenizer,
)

_TOKEN_STOP: Final = "stop"
_LOOP_REASON: Final = "repetition_detected"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """It says how token ids become text."""

    stops: StopStrings | None = None
    include_stop: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    min_tokens: int = 0
    """Stop strings are ignored until the choice has this many tokens."""
    stream_interval: int = 1
    """Tokens that a chunk waits for; the first and the last chunk do not wait."""
    drops_output: bool = False
    """It tells whether max_tokens was 0: only the prompt is returned."""


class Choice:
    def __init__(
        self,
        index: int,
        vocabulary: Vocabulary,
        options: TextOptions,
        context_ids: Sequence[int] = (),
        parser: Parser | None = None,
    ) -> None:
        self.index = index
        self.num_tokens = 0
        """The usage: up to and including the token that ended the choice."""
        self.cached_tokens: int | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.alignment: list[int] | None = None
        """See `Delta.alignment`."""
        self.drafts: tuple[int, int] | None = None
        """Tokens that were drafted, and those of them that are the stream's; None: none were."""
        self.finish_reason: str | None = None
        """The worker's reason; `OutputChunk.finish_reason` is `tool_calls` after a call."""
        self._options = options
        self._parser = parser
        self._events: list[Event] = []
        """Events of the next chunk."""
        self._has_called = False
        self._reasoning_tokens = 0
        self._detokenizer: Detokenizer = make_detokenizer(
            vocabulary,
            context_ids,
            skip_special_tokens=options.skip_special_tokens,
            spaces_between_special_tokens=options.spaces_between_special_tokens,
        )
        self._matcher = (
            StopMatcher(options.stops, options.include_stop) if options.stops is not None else None
        )
        self._pending: OutputChunk | None = None
        self._has_begun = False
        """It tells whether a chunk was returned."""

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens among `num_tokens` that are reasoning; None without a parser."""
        return None if self._parser is None else self._reasoning_tokens

    def push(self, output: Output) -> OutputChunk | None:
        """The chunk to send; None if there is nothing to send yet, or after the end."""
        if self.finish_reason is not None:
            return None
        if output.cached_tokens is not None and self.cached_tokens is None:
            self.cached_tokens = output.cached_tokens
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        self.alignment = output.alignment or self.alignment
        self.drafts = output.drafts or self.drafts
        chunk = self._pending or OutputChunk(self.index)
        self._pending = None
        if self._matcher is None and self._parser is None:
            ids = output.token_ids
            visible = ids if output.finish is None else self._visible(ids, output)
            chunk.text += self._detokenizer.push(visible)
            chunk.token_ids.extend(ids)
            if output.logprobs:
                chunk.logprobs.extend(output.logprobs)
            self.num_tokens += len(ids)
        else:
            self._add_each(chunk, output)
        if output.finish is not None and self.finish_reason is None:
            self._finish(chunk, output)
        return self._release(chunk)

    def _add_each(self, chunk: OutputChunk, output: Output) -> None:
        """Add token by token: the choice ends with the token that completes a stop string."""
        visible = self._visible(output.token_ids, output)
        for index, token_id in enumerate(output.token_ids):
            text = self._detokenizer.push((token_id,)) if index < len(visible) else ""
            self.num_tokens += 1
            chunk.token_ids.append(token_id)
            if output.logprobs:
                chunk.logprobs.append(output.logprobs[index])
            stop = None
            if self._matcher is not None:
                may_stop = self.num_tokens > self._options.min_tokens
                text, stop = self._matcher.push(text, may_stop=may_stop)
            num_events = len(self._events)
            self._add_text(chunk, text)
            if output.logprobs and self._parser is not None:
                chunk.content_bytes.append(_content_bytes(self._events[num_events:]))
            if self._parser is not None and self._parser.is_reasoning:
                self._reasoning_tokens += 1
            if stop is not None:
                self._end(chunk, "stop", stop)
                return

    def _add_text(self, chunk: OutputChunk, text: str) -> None:
        chunk.text += text
        if text and self._parser is not None:
            self._add_events(self._parser.push(text))

    def _add_events(self, events: list[Event]) -> None:
        for event in events:
            self._events.append(event)
            if type(event) is CallBegin:
                self._has_called = True

    def _visible(self, ids: list[int], output: Output) -> list[int]:
        """The ids that become text: all but a token that stopped the stream."""
        is_stop_token = output.finish == _TOKEN_STOP and bool(ids)
        return ids[:-1] if is_stop_token and not self._options.include_stop else ids

    def _finish(self, chunk: OutputChunk, output: Output) -> None:
        rest = self._detokenizer.finish()
        if self._matcher is not None:
            scan = self._matcher.push(rest)
            rest = scan.text + (self._matcher.finish() if scan.stop is None else "")
        self._add_text(chunk, rest)
        is_loop = output.finish == "repetition"
        self._end(
            chunk, output.finish, _LOOP_REASON if is_loop else output.stop_text or output.stop_token
        )

    def _end(self, chunk: OutputChunk, reason: str | None, stop_reason: str | int | None) -> None:
        if self._parser is not None:
            rest = self._parser.finish()
            self._add_events(rest)
            if chunk.content_bytes and rest:
                num_bytes = chunk.content_bytes[-1] or 0
                chunk.content_bytes[-1] = num_bytes + (_content_bytes(rest) or 0)
        self.finish_reason = reason
        # A call that was cut off has the finish reason "length".
        has_called = reason == _TOKEN_STOP and self._has_called
        chunk.finish_reason = "tool_calls" if has_called else reason
        chunk.stop_reason = stop_reason

    def _release(self, chunk: OutputChunk) -> OutputChunk | None:
        options = self._options
        if options.drops_output:
            if chunk.finish_reason is None:
                return None
            self.num_tokens = 0
            return OutputChunk(self.index, finish_reason="length")
        is_full = len(chunk.token_ids) >= options.stream_interval or not self._has_begun
        if chunk.finish_reason is None and not is_full:
            self._pending = chunk
            return None
        self._has_begun = True
        if self._parser is not None:
            chunk.events = join_events(self._events) if len(self._events) > 1 else self._events
            self._events = []
        return chunk


def _content_bytes(events: list[Event]) -> int | None:
    """The entry of `OutputChunk.content_bytes` for one token's events."""
    if not events:
        return None
    return sum(len(event.text.encode()) for event in events if type(event) is Content)

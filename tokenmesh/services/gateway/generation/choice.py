"""Choice: one stream's ids become one choice's text, with stop strings and log-probabilities.

With a parser the text becomes events as well. Neither depends on how the ids were portioned into
messages; nor does what is counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tokenmesh.services.gateway.generation.chunk import OutputChunk, join_events
from tokenmesh.services.gateway.mesh.session import Output
from tokenmesh.services.gateway.parsers.events import CallBegin, Content, Event
from tokenmesh.services.gateway.parsers.parser import Parser
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
    """How a request wants its text."""

    stops: StopStrings | None = None
    include_stop: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    min_tokens: int = 0
    """Stop strings count only after so many tokens."""
    stream_interval: int = 1
    """Tokens that a frame waits for; the first and the last frame wait for none."""
    drops_output: bool = False
    """max_tokens was 0: only the prompt was wanted."""


class Choice:
    """The state of one choice."""

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
        """Counted as usage: up to and including the token that ended the choice."""
        self.cached_tokens: int | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.finish_reason: str | None = None
        """The worker's word: `OutputChunk.finish_reason` also knows of tool calls."""
        self._options = options
        self._parser = parser
        self._events: list[Event] = []
        """Not passed on yet."""
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
        self._kept: OutputChunk | None = None
        self._has_begun = False

    @property
    def reasoning_tokens(self) -> int | None:
        """Those of `num_tokens` that the parser found to be reasoning; None without a parser."""
        return None if self._parser is None else self._reasoning_tokens

    def push(self, output: Output) -> OutputChunk | None:
        """What there is to pass on; None when nothing is, or after the end."""
        if self.finish_reason is not None:
            return None
        if output.cached_tokens is not None and self.cached_tokens is None:
            self.cached_tokens = output.cached_tokens
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        piece = self._kept or OutputChunk(self.index)
        self._kept = None
        if self._matcher is None and self._parser is None:
            self._add(piece, output)
        else:
            self._add_each(piece, output)
        if output.finish is not None and self.finish_reason is None:
            self._finish(piece, output)
        return self._release(piece)

    def _add(self, piece: OutputChunk, output: Output) -> None:
        ids = output.token_ids
        piece.text += self._detokenizer.push(self._written(ids, output))
        piece.token_ids.extend(ids)
        if output.logprobs:
            piece.logprobs.extend(output.logprobs)
        self.num_tokens += len(ids)

    def _add_each(self, piece: OutputChunk, output: Output) -> None:
        """Token by token: the choice ends with the one that completes a stop string."""
        written = self._written(output.token_ids, output)
        for index, token_id in enumerate(output.token_ids):
            text = self._detokenizer.push((token_id,)) if index < len(written) else ""
            self.num_tokens += 1
            piece.token_ids.append(token_id)
            if output.logprobs:
                piece.logprobs.append(output.logprobs[index])
            stop = None
            if self._matcher is not None:
                may_stop = self.num_tokens > self._options.min_tokens
                text, stop = self._matcher.push(text, may_stop=may_stop)
            num_events = len(self._events)
            self._pass_on(piece, text)
            if output.logprobs and self._parser is not None:
                piece.content_bytes.append(_content_bytes(self._events[num_events:]))
            if self._parser is not None and self._parser.is_reasoning:
                self._reasoning_tokens += 1
            if stop is not None:
                self._end(piece, "stop", stop)
                return

    def _pass_on(self, piece: OutputChunk, text: str) -> None:
        piece.text += text
        if text and self._parser is not None:
            self._take(self._parser.push(text))

    def _take(self, events: list[Event]) -> None:
        for event in events:
            self._events.append(event)
            if type(event) is CallBegin:
                self._has_called = True

    def _written(self, ids: list[int], output: Output) -> list[int]:
        """The ids that become text: a token that stopped the stream is not part of it."""
        is_stop_token = output.finish == _TOKEN_STOP and bool(ids)
        return ids[:-1] if is_stop_token and not self._options.include_stop else ids

    def _finish(self, piece: OutputChunk, output: Output) -> None:
        rest = self._detokenizer.finish()
        if self._matcher is not None:
            scan = self._matcher.push(rest)
            rest = scan.text + (self._matcher.finish() if scan.stop is None else "")
        self._pass_on(piece, rest)
        is_loop = output.finish == "repetition"
        self._end(piece, output.finish, _LOOP_REASON if is_loop else output.stop_token)

    def _end(self, piece: OutputChunk, reason: str | None, stop_reason: str | int | None) -> None:
        if self._parser is not None:
            rest = self._parser.finish()
            self._take(rest)
            if piece.content_bytes and rest:
                num_bytes = piece.content_bytes[-1] or 0
                piece.content_bytes[-1] = num_bytes + (_content_bytes(rest) or 0)
        self.finish_reason = reason
        # A call that the model had no room to finish is told by "length".
        has_called = reason == _TOKEN_STOP and self._has_called
        piece.finish_reason = "tool_calls" if has_called else reason
        piece.stop_reason = stop_reason

    def _release(self, piece: OutputChunk) -> OutputChunk | None:
        options = self._options
        if options.drops_output:
            if piece.finish_reason is None:
                return None
            self.num_tokens = 0
            return OutputChunk(self.index, finish_reason="length")
        is_full = len(piece.token_ids) >= options.stream_interval or not self._has_begun
        if piece.finish_reason is None and not is_full:
            self._kept = piece
            return None
        self._has_begun = True
        if self._parser is not None:
            piece.events = join_events(self._events) if len(self._events) > 1 else self._events
            self._events = []
        return piece


def _content_bytes(events: list[Event]) -> int | None:
    """See `OutputChunk.content_bytes`."""
    if not events:
        return None
    return sum(len(event.text.encode()) for event in events if type(event) is Content)

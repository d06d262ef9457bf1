"""Choice: one stream's ids become one choice's text, with stop strings and log-probabilities.

The text does not depend on how the ids were portioned into messages; nor does what is counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from tokenmesh.services.gateway.session import Output
from tokenmesh.shared.messages.tokens import TokenLogprobs
from tokenmesh.shared.text import (
    Detokenizer,
    StopMatcher,
    StopStrings,
    Vocabulary,
    make_detokenizer,
)

_TOKEN_STOP: Final = "stop"


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


@dataclass(slots=True)
class Piece:
    """What a choice passes on at one time."""

    choice: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class Choice:
    """The state of one choice."""

    def __init__(
        self,
        index: int,
        vocabulary: Vocabulary,
        options: TextOptions,
        context_ids: Sequence[int] = (),
    ) -> None:
        self.index = index
        self.num_tokens = 0
        """Counted as usage: up to and including the token that ended the choice."""
        self.cached_tokens: int | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.finish_reason: str | None = None
        self._options = options
        self._detokenizer: Detokenizer = make_detokenizer(
            vocabulary,
            context_ids,
            skip_special_tokens=options.skip_special_tokens,
            spaces_between_special_tokens=options.spaces_between_special_tokens,
        )
        self._matcher = (
            StopMatcher(options.stops, options.include_stop) if options.stops is not None else None
        )
        self._kept: Piece | None = None
        self._has_begun = False

    def push(self, output: Output) -> Piece | None:
        """What there is to pass on; None when nothing is, or after the end."""
        if self.finish_reason is not None:
            return None
        if output.cached_tokens is not None and self.cached_tokens is None:
            self.cached_tokens = output.cached_tokens
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        piece = self._kept or Piece(self.index)
        self._kept = None
        if self._matcher is None:
            self._add(piece, output)
        else:
            self._add_watching(piece, output, self._matcher)
        if output.finish is not None and self.finish_reason is None:
            self._finish(piece, output)
        return self._release(piece)

    def _add(self, piece: Piece, output: Output) -> None:
        ids = output.token_ids
        piece.text += self._detokenizer.push(self._written(ids, output))
        piece.token_ids.extend(ids)
        if output.logprobs:
            piece.logprobs.extend(output.logprobs)
        self.num_tokens += len(ids)

    def _add_watching(self, piece: Piece, output: Output, matcher: StopMatcher) -> None:
        """Token by token: the choice ends with the one that completes a stop string."""
        written = self._written(output.token_ids, output)
        for index, token_id in enumerate(output.token_ids):
            text = self._detokenizer.push((token_id,)) if index < len(written) else ""
            self.num_tokens += 1
            piece.token_ids.append(token_id)
            if output.logprobs:
                piece.logprobs.append(output.logprobs[index])
            if self.num_tokens <= self._options.min_tokens:
                piece.text += text
                continue
            scan = matcher.push(text)
            piece.text += scan.text
            if scan.stop is not None:
                self.finish_reason = piece.finish_reason = "stop"
                piece.stop_reason = scan.stop
                return

    def _written(self, ids: list[int], output: Output) -> list[int]:
        """The ids that become text: a token that stopped the stream is not part of it."""
        is_stop_token = output.finish == _TOKEN_STOP and bool(ids)
        return ids[:-1] if is_stop_token and not self._options.include_stop else ids

    def _finish(self, piece: Piece, output: Output) -> None:
        rest = self._detokenizer.finish()
        if self._matcher is not None:
            scan = self._matcher.push(rest)
            rest = scan.text + (self._matcher.finish() if scan.stop is None else "")
        piece.text += rest
        self.finish_reason = piece.finish_reason = output.finish
        piece.stop_reason = output.stop_token

    def _release(self, piece: Piece) -> Piece | None:
        options = self._options
        if options.drops_output:
            if piece.finish_reason is None:
                return None
            self.num_tokens = 0
            return Piece(self.index, finish_reason="length")
        is_full = len(piece.token_ids) >= options.stream_interval or not self._has_begun
        if piece.finish_reason is None and not is_full:
            self._kept = piece
            return None
        self._has_begun = True
        return piece


def merge(pieces: list[Piece], num_choices: int) -> list[Piece]:
    """All pieces of each choice as one."""
    texts: list[list[str]] = [[] for _ in range(num_choices)]
    merged = [Piece(index) for index in range(num_choices)]
    for piece in pieces:
        whole = merged[piece.choice]
        texts[piece.choice].append(piece.text)
        whole.token_ids.extend(piece.token_ids)
        whole.logprobs.extend(piece.logprobs)
        if piece.finish_reason is not None:
            whole.finish_reason = piece.finish_reason
            whole.stop_reason = piece.stop_reason
    for whole, parts in zip(merged, texts, strict=True):
        whole.text = "".join(parts)
    return merged

"""Parsing: how a model's output is parsed, and where in it a constraint begins."""

from dataclasses import dataclass, replace
from typing import Final

import xxhash

from tokenmesh.services.gateway.parsers.formats import FormatFamily
from tokenmesh.services.gateway.parsers.parser import (
    CallArguments,
    CallBegin,
    Event,
    ParseContext,
    Parser,
    Reasoning,
    ToolSchema,
)
from tokenmesh.shared.messages import Described
from tokenmesh.shared.messages.sampling import ThinkingBudget
from tokenmesh.shared.text import Vocabulary
from tokenmesh.shared.tokens import BYTES_PER_ID, unpack_ids

_TAIL_TOKENS: Final = 32
"""Last prompt tokens that parsers see: more than any marker around reasoning has."""
_CONTINUED_TAIL_TOKENS: Final = 4096
"""The same if the prompt ends with an unfinished message, which may hold long reasoning."""


@dataclass(frozen=True, slots=True)
class ModelText:
    """It says how a model's text is written and read."""

    described: Described
    vocabulary: Vocabulary
    defaults: dict[str, object]
    """Sampling fields of the model's generation config, for those that a request omits."""
    family: FormatFamily
    """The format of reasoning and tool calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsing:
    """It says how the output of one request is parsed."""

    family: FormatFamily
    vocabulary: Vocabulary
    tools: tuple[ToolSchema, ...] = ()
    thinking: bool | None = None
    """The chat template's thinking option, if the request sets it."""
    continues: bool = False
    """It tells whether the prompt ends with an unfinished message."""
    shows_reasoning: bool = True
    shows_many_calls: bool = True
    """False: only the first tool call is kept."""

    @property
    def shows_special(self) -> bool:
        """Return whether the detokenizer must write special tokens because a parser needs them."""
        reasoning, tools = self.family.reasoning, self.family.tools
        if tools is not None and tools.needs_special_tokens and (self.tools or tools.reads_all):
            return True
        if reasoning is None or not reasoning.needs_special_tokens:
            return False
        # Most models' markers are single tokens, but not special ones.
        texts = filter(None, (reasoning.start, reasoning.end))
        markers = [each for text in texts for each in self.vocabulary.marker_ids(text)]
        is_special = not self.vocabulary.special_ids.isdisjoint(markers)
        return is_special or reasoning.tools is not None

    def make_parsers(self, packed_ids: bytes, count: int) -> list[Parser | None]:
        """A parser for each choice of a prompt; None: all of the text is content."""
        if self.family.reasoning is None and self.family.tools is None:
            return [None] * count
        context = self._context(packed_ids)
        prompt = xxhash.xxh3_128_hexdigest(packed_ids)
        seeds = (f"{prompt}:{index}" for index in range(count))
        return [self._make(replace(context, seed=seed)) for seed in seeds]

    def reasoning_ends(self, packed_ids: bytes) -> list[list[int]]:
        """Token sequences that end reasoning; none if the output does not begin with it."""
        ends = self.family.reasoning_ends
        if not ends or not self.family.begins_reasoning(self._context(packed_ids)):
            return []
        return [self.vocabulary.marker_ids(end) for end in ends]

    def reasoning_markers(self) -> tuple[list[int], list[list[int]]]:
        """The start marker of reasoning (may be empty); what ends it, a budget's text first."""
        reasoning = self.family.reasoning
        if reasoning is None:
            return [], []
        ends = [*self.family.cuts, *(reasoning.calls if self.tools else ())]
        start = self.vocabulary.marker_ids(reasoning.start) if reasoning.start else []
        return start, [self.vocabulary.marker_ids(end) for end in ends]

    def reasoning_spent(self, packed_ids: bytes) -> int | None:
        """Reasoning tokens at the end of the prompt; None: output does not begin in reasoning."""
        reasoning, context = self.family.reasoning, self._context(packed_ids)
        if reasoning is None or not reasoning.make(context).is_reasoning:
            return None
        tail, (start, _) = self._tail(packed_ids), self.reasoning_markers()
        has_marker = self.continues or context.prompt_tail.rstrip().endswith(reasoning.start)
        # Without a marker in the format or the prompt, all reasoning is in the output.
        if not start or not has_marker:
            return 0
        ends = range(len(tail), len(start) - 1, -1)
        begun = next((end for end in ends if tail[end - len(start) : end] == start), len(tail))
        return len(tail) - begun

    def _make(self, context: ParseContext) -> Parser | None:
        parser = self.family.make(context)
        if parser is None or (self.shows_reasoning and self.shows_many_calls):
            return parser
        return _Selection(parser, self.shows_reasoning, self.shows_many_calls)

    def _tail(self, packed_ids: bytes) -> list[int]:
        num_tokens = _CONTINUED_TAIL_TOKENS if self.continues else _TAIL_TOKENS
        return unpack_ids(packed_ids[-num_tokens * BYTES_PER_ID :])

    def _context(self, packed_ids: bytes) -> ParseContext:
        return ParseContext(
            prompt_tail=self.vocabulary.decode(self._tail(packed_ids)),
            continues=self.continues,
            tools=self.tools,
            thinking=self.thinking,
        )


class _Selection:
    """Removes events that the request excludes."""

    __slots__ = ("_parser", "_shows_many_calls", "_shows_reasoning")

    def __init__(self, parser: Parser, shows_reasoning: bool, shows_many_calls: bool) -> None:
        self._parser = parser
        self._shows_reasoning = shows_reasoning
        self._shows_many_calls = shows_many_calls

    @property
    def is_reasoning(self) -> bool:
        return self._parser.is_reasoning

    def push(self, text: str) -> list[Event]:
        return [event for event in self._parser.push(text) if self._shows(event)]

    def finish(self) -> list[Event]:
        return [event for event in self._parser.finish() if self._shows(event)]

    def _shows(self, event: Event) -> bool:
        if isinstance(event, Reasoning):
            return self._shows_reasoning
        if isinstance(event, CallBegin | CallArguments):
            return self._shows_many_calls or event.index == 0
        return True


@dataclass(frozen=True, slots=True)
class ReasoningBudget:
    """Most reasoning tokens of a request. The model's reasoning has an end marker."""

    num_tokens: int
    parsing: Parsing

    def rule(self, packed_ids: bytes) -> ThinkingBudget:
        """The worker's rule for choices of a tokenized prompt."""
        spent = self.parsing.reasoning_spent(packed_ids)
        start, ends = self.parsing.reasoning_markers()
        return ThinkingBudget(
            num_tokens=self.num_tokens,
            is_open=spent is not None,
            num_spent=spent or 0,
            start_ids=start,
            end_ids=ends[0],
            other_ends=ends[1:],
        )

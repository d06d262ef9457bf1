"""The entries of the registry: a format of reasoning, a format of tool calls, or both."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from tokenmesh.services.gateway.parsers.parser import (
    CallArguments,
    CallBegin,
    Content,
    Event,
    ParseContext,
    Parser,
)

NAME: Final = "\0"

MakeId = Callable[[int], str]
"""The id of the n-th call of a choice."""


class Chain:
    """A reasoning parser, followed by a tool parser for the content that it leaves."""

    __slots__ = ("_indexes", "_reasoning", "_tools")

    def __init__(self, reasoning: Parser, tools: Parser) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._indexes: dict[tuple[Parser, int], int] = {}
        """Indexes of calls: both parsers may find some, and each counts from 0."""

    @property
    def is_reasoning(self) -> bool:
        return self._reasoning.is_reasoning

    def push(self, text: str) -> list[Event]:
        return self._pass_on(self._reasoning.push(text))

    def finish(self) -> list[Event]:
        passed = self._pass_on(self._reasoning.finish())
        return [*passed, *self._numbered(self._tools, self._tools.finish())]

    def _pass_on(self, events: list[Event]) -> list[Event]:
        passed: list[Event] = []
        for event in events:
            if type(event) is Content:
                passed.extend(self._numbered(self._tools, self._tools.push(event.text)))
            else:
                passed.extend(self._numbered(self._reasoning, (event,)))
        return passed

    def _numbered(self, source: Parser, events: Iterable[Event]) -> Iterator[Event]:
        """Events of one of the parsers, with calls counted over both."""
        for event in events:
            if type(event) is CallBegin:
                index = self._indexes[source, event.index] = len(self._indexes)
                yield CallBegin(index, event.name, event.model_id)
            elif type(event) is CallArguments:
                yield CallArguments(self._indexes[source, event.index], event.text)
            else:
                yield event


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFrame:
    """The text around a call with JSON arguments; a grammar needs it to constrain the call."""

    marker: str
    """Text that only begins calls."""
    before: str
    """Between the marker and the function's name."""
    after: str
    """Between the name and the arguments."""
    end: str
    opening: str = ""
    """May stand before the first call."""
    closing: str = ""
    """May stand after the last call."""

    @property
    def marks(self) -> tuple[str, str]:
        """Return what is always written as it is: before the function's name, and behind the
        call.
        """
        return self.marker + self.before, self.end


@dataclass(frozen=True, slots=True, kw_only=True)
class BareCalls:
    """Calls that are JSON objects and the whole answer."""

    arguments_key: str
    is_list: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """It says how a family of models writes tool calls."""

    make: Callable[[ParseContext], Parser]
    """Makes the parser of one choice; it reads the content that the reasoning parser leaves."""
    needs_special_tokens: bool = False
    """Its markers are special tokens, which the detokenizer must then include in the text."""
    make_ids: Callable[[ParseContext], MakeId] | None = None
    """Makes call ids in a form that the family's templates require; used also for calls that a
    grammar forces into another format."""
    frame: CallFrame | None = None
    """For calls of strict functions; None: they cannot be constrained to their schemas."""
    bare: BareCalls | None = None
    """Calls without markers, which only their place tells from other text."""
    begins: tuple[str, ...] = ()
    """Texts one of which every other call begins with; `NAME` stands for the function's name."""
    reads_all: bool = False
    """Answers without calls contain markers as well, for example of channels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """It says how a family of models writes reasoning."""

    make: Callable[[ParseContext], Parser]
    """Makes the parser of one choice, which reads its text from the first character."""
    begins: Callable[[ParseContext], bool]
    """It tells whether the answer will begin with reasoning, as far as the prompt shows."""
    start: str = ""
    """The marker before reasoning; empty: the format has none."""
    end: str = ""
    """The marker after it; constraints on the answer apply from there."""
    other_ends: tuple[str, ...] = ()
    """Other spellings of that marker."""
    calls: tuple[str, ...] = ()
    """Markers of tool calls, which also end reasoning if the request has tools."""
    needs_special_tokens: bool = True
    """Its markers may be special tokens, which the detokenizer must then include in the text."""
    tools: ToolFormat | None = None
    """The format of tool calls that the same parser reads; no chain is made then."""


@dataclass(frozen=True, slots=True)
class FormatFamily:
    """The two formats of one model; either may be missing."""

    reasoning: ReasoningFormat | None = None
    tools: ToolFormat | None = None
    budget_end: str = ""
    """It holds what the model writes when a budget of reasoning is spent; empty: the end marker
    alone."""

    @property
    def cuts(self) -> tuple[str, ...]:
        """Return what a spent budget writes, then all that ends reasoning by itself."""
        ends = self.reasoning_ends
        if not ends or not self.budget_end:
            return ends
        is_complete = any(end in self.budget_end for end in ends)
        return (self.budget_end if is_complete else self.budget_end + ends[0], *ends)

    @property
    def reasoning_ends(self) -> tuple[str, ...]:
        """The texts after which constraints start, for answers that begin with reasoning."""
        if self.reasoning is None or not self.reasoning.end:
            return ()
        return (self.reasoning.end, *self.reasoning.other_ends)

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts whose ids are needed where the family is used."""
        reasoning, frame = self.reasoning, None if self.tools is None else self.tools.frame
        found = [] if reasoning is None else [reasoning.start, reasoning.end, *reasoning.calls]
        if frame is not None:
            found += frame.marks
        return tuple(filter(None, dict.fromkeys((*found, *self.cuts))))

    @property
    def can_cut_reasoning(self) -> bool:
        """Return whether the end marker ends reasoning wherever it stands; in channels it
        does not.
        """
        found = self.reasoning
        return found is not None and bool(found.end) and found.tools is None

    def begins_reasoning(self, context: ParseContext) -> bool:
        """Return whether the answer to this prompt will begin with reasoning, as far as it
        shows.
        """
        return self.reasoning is not None and self.reasoning.begins(context)

    def make(self, context: ParseContext) -> Parser | None:
        """A parser for one choice; None when all of its text is content."""
        if self.reasoning is None:
            return self.tools.make(context) if self.tools is not None else None
        first = self.reasoning.make(context)
        if self.tools is None or self.tools is self.reasoning.tools:
            return first
        return Chain(first, self.tools.make(context))

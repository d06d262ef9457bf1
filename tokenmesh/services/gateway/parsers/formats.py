"""What a registered name stands for: a format of reasoning, a format of tool calls, or both."""

from collections.abc import Callable
from dataclasses import dataclass

from tokenmesh.services.gateway.parsers.chain import Chain
from tokenmesh.services.gateway.parsers.parser import ParseContext, Parser

MakeId = Callable[[int], str]
"""The id of the call at that place of an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFrame:
    """What a call is written in, where its arguments are JSON: what a grammar needs to bind it."""

    marker: str
    """Text that only begins calls."""
    before: str
    """Between the marker and the function's name."""
    after: str
    """Between the name and the arguments."""
    end: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a family of models writes tool calls."""

    make: Callable[[ParseContext], Parser]
    """A parser for one choice; it is given the content that the reasoning parser leaves."""
    needs_special_tokens: bool = False
    """Its markers are special tokens: the detokenizer must show those."""
    make_ids: Callable[[ParseContext], MakeId] | None = None
    """Ids of calls in a form that the family's templates insist on, also for calls that a grammar
    has forced into another format."""
    frame: CallFrame | None = None
    """For calls of strict functions; None: they cannot be bound to their schemas."""
    reads_all: bool = False
    """Answers without calls have markers as well, of channels and the like."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """How a family of models writes reasoning."""

    make: Callable[[ParseContext], Parser]
    """A parser for one choice, from its first character on."""
    begins: Callable[[ParseContext], bool]
    """Whether the model will reason before it answers, as far as the prompt tells."""
    start: str = ""
    """The marker before reasoning; empty: the format has none."""
    end: str = ""
    """The marker after it: constraints on the answer apply from there on."""
    other_ends: tuple[str, ...] = ()
    """Further ways to write that marker."""
    calls: tuple[str, ...] = ()
    """Markers of tool calls, which end reasoning too where the request has tools."""
    needs_special_tokens: bool = True
    """Its markers may be special tokens: the detokenizer must show those."""
    tools: ToolFormat | None = None
    """The format of tool calls that the same parser reads: there is no chain then."""


@dataclass(frozen=True, slots=True)
class FormatFamily:
    """The two formats of one model; either may be missing."""

    reasoning: ReasoningFormat | None = None
    tools: ToolFormat | None = None

    @property
    def reasoning_ends(self) -> tuple[str, ...]:
        """The texts after which constraints start, for answers that begin with reasoning."""
        if self.reasoning is None or not self.reasoning.end:
            return ()
        return (self.reasoning.end, *self.reasoning.other_ends)

    @property
    def can_cut_reasoning(self) -> bool:
        """Whether the end marker ends reasoning wherever it is written; in channels it does not."""
        found = self.reasoning
        return found is not None and bool(found.end) and found.tools is None

    def begins_reasoning(self, context: ParseContext) -> bool:
        """Whether the answer to this prompt begins with reasoning, as far as the prompt tells."""
        return self.reasoning is not None and self.reasoning.begins(context)

    def make(self, context: ParseContext) -> Parser | None:
        """A parser for one choice; None when all of its text is content."""
        if self.reasoning is None:
            return self.tools.make(context) if self.tools is not None else None
        first = self.reasoning.make(context)
        if self.tools is None or self.tools is self.reasoning.tools:
            return first
        return Chain(first, self.tools.make(context))

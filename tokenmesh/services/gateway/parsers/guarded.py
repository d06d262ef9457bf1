"""Guards for parser plugins: when one raises, the rest of the text is content."""

import functools
import logging
from collections.abc import Callable
from dataclasses import replace

from tokenmesh.services.gateway.parsers.events import Content, Event
from tokenmesh.services.gateway.parsers.formats import ReasoningFormat, ToolFormat
from tokenmesh.services.gateway.parsers.parser import ParseContext, Parser
from tokenmesh.services.gateway.parsers.tools.script import PlainText

logger = logging.getLogger(__name__)


class GuardedParser:
    """A plugin's parser, replaced by PlainText when it raises; the error is logged once."""

    __slots__ = ("_parser",)

    def __init__(self, make: Callable[[ParseContext], Parser], context: ParseContext) -> None:
        try:
            self._parser = make(context)
        except Exception:
            self._give_up()

    @property
    def is_reasoning(self) -> bool:
        try:
            return self._parser.is_reasoning
        except Exception:
            self._give_up()
            return False

    def push(self, text: str) -> list[Event]:
        try:
            return self._parser.push(text)
        except Exception:
            self._give_up()
            return [Content(text)]

    def finish(self) -> list[Event]:
        try:
            return self._parser.finish()
        except Exception:
            self._give_up()
            return []

    def _give_up(self) -> None:
        logger.exception("a parser plugin raised: the rest of the answer is content")
        self._parser = PlainText()


# Cached: FormatFamily compares the format of tools by identity with that of the reasoning format.
@functools.cache
def guard_tools(found: ToolFormat) -> ToolFormat:
    """The format with guarded parsers."""
    return replace(found, make=functools.partial(GuardedParser, found.make))


def guard_reasoning(found: ReasoningFormat) -> ReasoningFormat:
    """The format with guarded parsers."""
    return replace(
        found,
        make=functools.partial(GuardedParser, found.make),
        begins=functools.partial(_begins, found.begins),
        tools=None if found.tools is None else guard_tools(found.tools),
    )


def _begins(begins: Callable[[ParseContext], bool], context: ParseContext) -> bool:
    try:
        return begins(context)
    except Exception:
        logger.exception("a parser plugin raised: assuming an answer without reasoning")
        return False

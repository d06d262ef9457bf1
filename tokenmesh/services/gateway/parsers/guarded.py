"""Guards around what plugins bring: one that raises costs an answer its events, not its text."""

import functools
import logging
from collections.abc import Callable
from dataclasses import replace

from tokenmesh.services.gateway.parsers.events import Content, Event
from tokenmesh.services.gateway.parsers.formats import ReasoningFormat, ToolFormat
from tokenmesh.services.gateway.parsers.parser import ParseContext, Parser
from tokenmesh.services.gateway.parsers.tools.script_parser import PlainText

logger = logging.getLogger(__name__)


class Guarded:
    """A plugin's parser; from where it raises on, the text is content. That is logged once."""

    __slots__ = ("_parser",)

    def __init__(self, make: Callable[[ParseContext], Parser], context: ParseContext) -> None:
        try:
            self._parser = make(context)
        except Exception:
            self._give_up()

    @property
    def is_reasoning(self) -> bool:
        """See `Parser.is_reasoning`."""
        try:
            return self._parser.is_reasoning
        except Exception:
            self._give_up()
            return False

    def push(self, text: str) -> list[Event]:
        """See `Parser.push`."""
        try:
            return self._parser.push(text)
        except Exception:
            self._give_up()
            return [Content(text)]

    def finish(self) -> list[Event]:
        """See `Parser.finish`."""
        try:
            return self._parser.finish()
        except Exception:
            self._give_up()
            return []

    def _give_up(self) -> None:
        logger.exception("a parser plugin raised: the rest of the answer is told as content")
        self._parser = PlainText()


# Cached, as a format of both kinds is known by its tools being the very same object.
@functools.cache
def guard_tools(found: ToolFormat) -> ToolFormat:
    """The format with its parsers guarded."""
    return replace(found, make=functools.partial(Guarded, found.make))


@functools.cache
def guard_reasoning(found: ReasoningFormat) -> ReasoningFormat:
    """The format with its parsers guarded."""
    return replace(
        found,
        make=functools.partial(Guarded, found.make),
        begins=functools.partial(_begins, found.begins),
        tools=None if found.tools is None else guard_tools(found.tools),
    )


def _begins(begins: Callable[[ParseContext], bool], context: ParseContext) -> bool:
    try:
        return begins(context)
    except Exception:
        logger.exception("a parser plugin raised: the answer is taken to begin without reasoning")
        return False

"""gpt-oss: one parser reads its reasoning and its calls."""

from tokenmesh.services.gateway.parsers.formats import ReasoningFormat, ToolFormat
from tokenmesh.services.gateway.parsers.harmony.header import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    MESSAGE,
    RETURN,
    START,
)
from tokenmesh.services.gateway.parsers.harmony.parser import HarmonyParser
from tokenmesh.services.gateway.parsers.parser import ParseContext, Parser


def _make(context: ParseContext) -> Parser:
    header, message, _body = _unfinished(context.prompt_tail).partition(MESSAGE)
    return HarmonyParser([tool.name for tool in context.tools], header, bool(message))


def _unfinished(tail: str) -> str:
    """The message that the prompt has begun and the model goes on with."""
    begin = tail.rfind(START)
    begun = tail[begin:] if begin >= 0 else ""
    return "" if any(end in begun for end in (END, CALL, RETURN)) else begun


def _begins(context: ParseContext) -> bool:
    """Even an answer without reasoning comes behind the marker that ends it."""
    return MESSAGE not in _unfinished(context.prompt_tail)


OPENAI = ToolFormat(make=_make, needs_special_tokens=True, reads_all=True)
OPENAI_GPTOSS = ReasoningFormat(
    make=_make,
    begins=_begins,
    start=f"{CHANNEL}analysis{MESSAGE}",
    end=f"{CHANNEL}final{MESSAGE}",
    other_ends=tuple(f"{CHANNEL}final {CONSTRAIN}{kind}{MESSAGE}" for kind in ("json", "JSON")),
    tools=OPENAI,
)

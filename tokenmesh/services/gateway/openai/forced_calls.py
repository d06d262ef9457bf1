"""A chat whose answer has to be a call: what gives way, the constraint, and how it is read."""

from tokenmesh.services.gateway.context import RequestContext
from tokenmesh.services.gateway.openai import call_constraint as forced_calls
from tokenmesh.services.gateway.openai.chat_request import ChatRequest
from tokenmesh.services.gateway.openai.tool_use import ToolUse
from tokenmesh.services.gateway.parsers.formats import FormatFamily, ToolFormat
from tokenmesh.services.gateway.parsers.parser import ParseContext, Parser
from tokenmesh.services.gateway.parsers.tools import forced
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.messages.structured import Structured


def clear_formats(body: ChatRequest, tools: ToolUse, exchange: RequestContext) -> None:
    """A forced call is a format of its own. Raises InvalidInput."""
    if not tools.is_forced:
        return
    if body.structured_outputs is not None:
        raise InvalidInput(
            "structured_outputs does not go with a tool_choice that forces a call",
            param="structured_outputs",
        )
    if body.response_format is not None and body.response_format.type != "text":
        body.response_format = None
        exchange.warnings.append("response_format ignored: tool_choice forces a call")


def constraint_of(body: ChatRequest, tools: ToolUse, limits: GatewaySettings) -> Structured:
    """What makes the answer calls, of tools that are forced. Raises InvalidInput."""
    if tools.mode == "named":
        constraint = forced_calls.named_call(tools.schemas[0])
    else:
        max_calls = 1 if body.parallel_tool_calls is False else limits.max_forced_calls
        constraint = forced_calls.required_calls(tools.schemas, max_calls=max_calls)
    return constraint


def family_of(own: FormatFamily, tools: ToolUse) -> FormatFamily:
    """How the answer is written: the model's own format, but for calls that it is forced to."""
    if not tools.is_forced:
        return own if tools.schemas else FormatFamily(own.reasoning)
    make_ids = None if own.tools is None else own.tools.make_ids

    def make(context: ParseContext) -> Parser:
        make_id = None if make_ids is None else make_ids(context)
        if tools.mode == "named":
            return forced.named_call(tools.schemas[0].name, make_id)
        return forced.required_calls(make_id)

    return FormatFamily(own.reasoning, ToolFormat(make=make))

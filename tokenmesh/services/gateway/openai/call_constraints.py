"""Constraints on tool calls, and the parser for calls that are forced.

A forced call is the whole answer: `json_calls.py` reads it. A strict function need not be
called: the text is free, but once the model has written its marker of a call, the rest of the call
is constrained to one of the functions and its arguments. Arguments of functions that are not strict
may be any object.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from tokenmesh.services.gateway.context import RequestContext
from tokenmesh.services.gateway.generation.parsing import ModelText
from tokenmesh.services.gateway.openai.request import ChatRequest
from tokenmesh.services.gateway.openai.tools import ToolUse
from tokenmesh.services.gateway.parsers.formats import CallFrame, FormatFamily, ToolFormat
from tokenmesh.services.gateway.parsers.parser import ParseContext, Parser, ToolSchema
from tokenmesh.services.gateway.parsers.tools import json_calls
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.messages.structured import Structured


def clear_formats(body: ChatRequest, tools: ToolUse, context: RequestContext) -> None:
    """Remove a format that a forced call replaces. Raises InvalidInput."""
    if not tools.is_forced:
        return
    if body.structured_outputs is not None:
        raise InvalidInput(
            "structured_outputs cannot be combined with a tool_choice that forces a call",
            param="structured_outputs",
        )
    if body.response_format is not None and body.response_format.type != "text":
        body.response_format = None
        context.warnings.append("response_format ignored: tool_choice forces a call")


def call_constraint(
    body: ChatRequest,
    tools: ToolUse,
    text: ModelText,
    context: RequestContext,
    limits: GatewaySettings,
) -> Structured | None:
    """What constrains the calls of the answer, or None."""
    if tools.mode == "named":
        return named_call(tools.schemas[0])
    if tools.mode == "required":
        max_calls = 1 if body.parallel_tool_calls is False else limits.max_forced_calls
        return required_calls(tools.schemas, max_calls=max_calls)
    if tools.mode == "auto" and text.family.tools is None:
        context.warnings.append("tools: the model has no tool_call_parser, calls stay text")
    elif tools.has_strict:
        structured = strict_calls(tools, text)
        if structured is None:
            context.warnings.append("tools: strict has no effect with this model's calls")
        return structured
    return None


def family_of(own: FormatFamily, tools: ToolUse) -> FormatFamily:
    """How the answer is written: in the model's own format, unless a call is forced."""
    if not tools.is_forced:
        return own if tools.schemas else FormatFamily(own.reasoning)
    make_ids = None if own.tools is None else own.tools.make_ids

    def make(context: ParseContext) -> Parser:
        make_id = None if make_ids is None else make_ids(context)
        if tools.mode == "named":
            return json_calls.named_call(tools.schemas[0].name, make_id)
        return json_calls.required_calls(make_id)

    return FormatFamily(own.reasoning, ToolFormat(make=make))


def named_call(tool: ToolSchema) -> Structured:
    """The answer is the arguments of this function."""
    return _json(tool.parameters)


def required_calls(tools: Sequence[ToolSchema], *, max_calls: int) -> Structured:
    """The answer is a list of 1 to `max_calls` objects {"name": ..., "parameters": ...}.

    A schema that refers to its own root moves to the definitions of the whole schema.
    """
    definitions: dict[str, Any] = {}
    calls = []
    for index, tool in enumerate(tools):
        parameters: Any = tool.parameters
        key = f"call{index}"
        moved = _move_references(parameters, f"#/$defs/{key}")
        if moved != parameters:
            definitions[key] = moved
            parameters = {"$ref": f"#/$defs/{key}"}
        calls.append(_call(tool.name, parameters))
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "maxItems": max_calls,
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
    }
    if definitions:
        schema["$defs"] = definitions
    return _json(schema)


def strict_calls(tools: ToolUse, text: ModelText) -> Structured | None:
    """The constraint; None: the format of this model's calls cannot be constrained."""
    frame = None if text.family.tools is None else text.family.tools.frame
    if frame is None or not _is_text(text, frame):
        return None
    tags = [_tag(tool, frame) for tool in tools.schemas]
    tag = {"type": "structural_tag", "structures": tags, "triggers": [frame.marker]}
    return Structured(kind="structural_tag", text=msgspec.json.encode(tag).decode(), field="tools")


def _json(schema: dict[str, Any]) -> Structured:
    text = msgspec.json.encode(schema).decode()
    # If any whitespace were allowed, a weak model might write it without end.
    return Structured(kind="json", text=text, any_whitespace=False, field="tools")


def _call(name: str, parameters: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"enum": [name]}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _move_references(value: Any, root: str) -> Any:
    """A copy of the schema whose references to its own root point to `root`."""
    if isinstance(value, list):
        return [_move_references(each, root) for each in value]
    if not isinstance(value, dict):
        return value
    moved = {key: _move_references(each, root) for key, each in value.items()}
    target = value.get("$ref")
    if isinstance(target, str) and target.startswith("#"):
        moved["$ref"] = root + target[1:]
    return moved


def _is_text(text: ModelText, frame: CallFrame) -> bool:
    """Whether the frame has no special tokens: a grammar is over text."""
    vocabulary = text.vocabulary
    written = vocabulary.encode(frame.marker + frame.before) + vocabulary.encode(frame.end)
    return vocabulary.special_ids.isdisjoint(written)


def _tag(tool: ToolSchema, frame: CallFrame) -> dict[str, Any]:
    return {
        "begin": f"{frame.marker}{frame.before}{tool.name}{frame.after}",
        "schema": tool.parameters if tool.strict else {"type": "object"},
        "end": frame.end,
    }

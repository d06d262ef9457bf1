"""ToolUse: which functions a chat may call and whether it must, and what constrains the calls.

A forced call is the whole answer: `json_calls.py` reads it. A strict function need not be
called: the text is free, but once the model has written its marker of a call, the rest of the call
is constrained to one of the functions and its arguments. Arguments of functions that are not strict
may be any object.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from tokenmesh.services.gateway.apis.openai.request import ChatRequest, Tool
from tokenmesh.services.gateway.core.context import RequestContext
from tokenmesh.services.gateway.core.generation.parsing import ModelText
from tokenmesh.services.gateway.core.http.errors import invalid
from tokenmesh.services.gateway.parsers.formats import NAME, CallFrame, ToolFormat
from tokenmesh.services.gateway.parsers.parser import ToolSchema
from tokenmesh.shared.config.requests import StructuredLimits
from tokenmesh.shared.errors import FieldPath, InvalidInput, field_name
from tokenmesh.shared.json_schema import LARK, changed_schema
from tokenmesh.shared.messages.structured import CallForm, CallForms, Structured

MAX_TOOLS_BYTES: Final = 1024 * 1024
"""Size of tools as JSON, all functions together."""
MAX_FORCED_CALLS: Final = 32
"""Calls of one answer with tool_choice required; without a bound a model that has nothing to call
may go on until its context is full."""

Mode = Literal["none", "auto", "required", "named"]

_NAME: Final = re.compile(r"[a-zA-Z0-9_.-]{1,128}", re.ASCII)
_ROOTS: Final = frozenset({"type", "$ref", "anyOf", "oneOf", "allOf"})
"""A schema with one of these describes its root."""

_MAX_SHOWN: Final = 128
"""Characters of a wrong value in an error."""

_NO_EFFECT: Final = "tools: strict and grammars have no effect with"
_NO_PARAMETERS: Final[dict[str, Any]] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    mode: Mode = "none"
    shown: tuple[Tool, ...] = ()
    """It holds what the chat template gets."""
    schemas: tuple[ToolSchema, ...] = ()
    """Functions that may be called; with mode `named` the one that must be."""

    @property
    def is_forced(self) -> bool:
        """Return whether the answer has to be a call."""
        return self.mode in ("required", "named")

    @property
    def has_strict(self) -> bool:
        """Return whether a call that the model may make has to follow its schema."""
        return self.mode == "auto" and any(schema.strict for schema in self.schemas)


NO_TOOLS: Final = ToolUse()


def read_tools(body: ChatRequest, limits: StructuredLimits) -> ToolUse:
    """The tools and tool_choice of a chat. Raises InvalidInput."""
    tools = body.tools or []
    schemas = _read_schemas(tools, limits)
    choice = body.tool_choice
    if choice is None:
        choice = "auto" if tools else "none"
    if choice == "none":
        # The model must not see the tools at all.
        return ToolUse()
    if not tools and choice != "auto":
        raise _wrong_choice("tool_choice needs tools")
    if isinstance(choice, str):
        return _use(_read_mode(choice, "tool_choice"), tools, schemas)
    return _read_choice(choice, tools, schemas)


def _use(mode: Mode, tools: Sequence[Tool], schemas: Sequence[ToolSchema]) -> ToolUse:
    shown = tuple(map(_shown_tool, tools))
    return ToolUse(mode=mode if tools else "none", shown=shown, schemas=tuple(schemas))


def _shown_tool(tool: Tool) -> Tool:
    """A tool as the template gets it: its description holds the grammar already."""
    parameters: Any = tool["function"].get("parameters")
    try:
        text = parameters["properties"]["input"]
        shown = {key: each for key, each in text.items() if key != LARK}
    except (AttributeError, KeyError, TypeError):  # not a custom tool
        return tool
    properties = {**parameters["properties"], "input": shown}
    function = {**tool["function"], "parameters": {**parameters, "properties": properties}}
    return {"type": "function", "function": function}


def _read_mode(value: object, place: str) -> Mode:
    if value == "auto" or value == "required":
        return value
    raise _wrong_choice(
        f"{place} is {_shown(value)}; it must be none, auto, required, or an object that names a "
        "function"
    )


def _read_choice(
    choice: dict[str, Any], tools: Sequence[Tool], schemas: Sequence[ToolSchema]
) -> ToolUse:
    kind = choice.get("type")
    if kind == "function":
        named = _find(_name_in(choice, "tool_choice"), schemas, "tool_choice.function.name")
        shown = tuple(map(_shown_tool, tools))
        return ToolUse(mode="named", shown=shown, schemas=(schemas[named],))
    if kind == "allowed_tools":
        return _read_allowed(choice.get("allowed_tools"), tools, schemas)
    raise _wrong_choice(f"tool_choice.type is {_shown(kind)}; it must be function or allowed_tools")


def _read_allowed(allowed: object, tools: Sequence[Tool], schemas: Sequence[ToolSchema]) -> ToolUse:
    place = "tool_choice.allowed_tools"
    entries = allowed.get("tools") if isinstance(allowed, dict) else None
    if not isinstance(allowed, dict) or not isinstance(entries, list) or not entries:
        raise _wrong_choice(f"{place}.tools must list at least one function")
    places = []
    for index, entry in enumerate(entries):
        where = f"{place}.tools[{index}]"
        places.append(_find(_name_in(entry, where), schemas, f"{where}.function.name"))
    mode = _read_mode(allowed.get("mode", "auto"), f"{place}.mode")
    kept = sorted(set(places))
    return _use(mode, [tools[each] for each in kept], [schemas[each] for each in kept])


def _name_in(entry: object, place: str) -> str:
    function = entry.get("function") if isinstance(entry, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise _wrong_choice(f"{place}.function.name must be a string")
    return name


def _wrong_choice(message: str) -> InvalidInput:
    return InvalidInput(message, param="tool_choice")


def _shown(value: object) -> str:
    return repr(value)[:_MAX_SHOWN]


def _find(name: str, schemas: Sequence[ToolSchema], place: str) -> int:
    for index, schema in enumerate(schemas):
        if schema.name == name:
            return index
    raise _wrong_choice(f"{place}: {_shown(name)} is not among tools")


def _read_schemas(tools: Sequence[Tool], limits: StructuredLimits) -> list[ToolSchema]:
    if len(tools) > limits.max_tools:
        raise invalid(
            "tools", f"holds {len(tools)} functions, at most {limits.max_tools} (gateway.max_tools)"
        )
    num_bytes = len(msgspec.json.encode(tools)) if tools else 0
    if num_bytes > MAX_TOOLS_BYTES:
        raise invalid(
            "tools",
            f"is {num_bytes} bytes of JSON, at most {MAX_TOOLS_BYTES}",
        )
    schemas = [
        _read_function(tool["function"], ("tools", index, "function"))
        for index, tool in enumerate(tools)
    ]
    names = set[str]()
    for index, schema in enumerate(schemas):
        if schema.name in names:
            path = ("tools", index, "function", "name")
            raise _invalid(path, f"{schema.name!r} is used twice")
        names.add(schema.name)
    return schemas


def _read_function(function: dict[str, Any], path: FieldPath) -> ToolSchema:
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _invalid(
            (*path, "name"), "must be 1 to 128 letters, digits, underscores, dots or dashes"
        )
    if not isinstance(function.get("description"), str | None):
        raise _invalid((*path, "description"), "must be a string")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = _NO_PARAMETERS
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise _invalid((*path, "parameters"), "must be a JSON schema of type object")
    if not _ROOTS & parameters.keys():
        parameters = {"type": "object", **parameters}
    strict = function.get("strict")
    if not isinstance(strict, bool | None):
        raise _invalid((*path, "strict"), "must be a boolean")
    return ToolSchema(name=name, parameters=parameters, strict=strict is True)


def _invalid(path: FieldPath, problem: str) -> InvalidInput:
    return InvalidInput(f"{field_name(path)} {problem}", param="tools", path=path)


def call_constraint(
    body: ChatRequest,
    tools: ToolUse,
    text: ModelText,
    context: RequestContext,
) -> Structured | None:
    """Return what constrains the calls of the answer, or None."""
    if tools.mode == "named":
        return named_call(tools.schemas[0])
    if tools.mode == "required":
        max_calls = 1 if body.parallel_tool_calls is False else MAX_FORCED_CALLS
        return required_calls(tools.schemas, max_calls=max_calls)
    if tools.mode == "auto" and text.family.tools is None:
        context.warnings.append("tools: the model has no tool_call_parser, calls stay text")
    elif tools.has_strict:
        structured = strict_calls(tools, text)
        if structured is None:
            context.warnings.append(f"{_NO_EFFECT} this model's calls")
        return structured
    return None


def add_calls(
    structured: Structured, tools: ToolUse, text: ModelText, context: RequestContext
) -> Structured:
    """The constraint of an answer in place of which the model may make calls.

    Raises InvalidInput for a format of calls whose beginning is not known.
    """
    calls = text.family.tools
    if calls is None:
        context.warnings.append("tools: the model has no tool_call_parser, it cannot call them")
        return structured
    forms = CallForms()
    has_channels = text.family.reasoning is not None and text.family.reasoning.tools is calls
    if structured.kind == "structural_tag":
        # Text outside of the tags is free, calls are as well.
        if tools.has_strict:
            context.warnings.append(f"{_NO_EFFECT} a structural tag")
        return structured
    if not has_channels:
        forms = call_forms(calls, tools.schemas)
        if not forms.forms:
            raise InvalidInput(
                f"{structured.field} cannot be combined with tools: this model's format of calls "
                "cannot be constrained. Set tool_choice",
                param=structured.field,
            )
    is_free = not forms.forms or any(form.schema is None for form in forms.forms)
    if tools.has_strict and is_free:
        context.warnings.append(f"{_NO_EFFECT} this model's calls")
    return msgspec.structs.replace(structured, calls=forms)


def call_forms(calls: ToolFormat, schemas: Sequence[ToolSchema]) -> CallForms:
    """Every way in which the calls of a format begin; none for calls in channels."""
    if calls.frame is not None:
        frame = calls.frame
        forms = [_form(schema, frame) for schema in schemas]
        return CallForms(forms=forms, opening=frame.opening, closing=frame.closing)
    forms = []
    if calls.bare is not None:
        schema = _any_call(schemas, calls.bare.arguments_key, binds_all=False)
        if calls.bare.is_list:
            schema = _list_of(schema)
        forms.append(CallForm(begin="", schema=msgspec.json.encode(schema).decode()))
    for begin in calls.begins:
        names = [schema.name for schema in schemas] if NAME in begin else [""]
        forms += [CallForm(begin=begin.replace(NAME, name)) for name in names]
    return CallForms(forms=forms)


def _form(tool: ToolSchema, frame: CallFrame) -> CallForm:
    tag = _tag(tool, frame)
    schema = msgspec.json.encode(tag["schema"]).decode()
    return CallForm(begin=tag["begin"], schema=schema, end=tag["end"])


def named_call(tool: ToolSchema) -> Structured:
    """The answer is the arguments of this function."""
    return _json(tool.parameters)


def required_calls(tools: Sequence[ToolSchema], *, max_calls: int) -> Structured:
    """The answer is a list of 1 to `max_calls` objects {"name": ..., "parameters": ...}."""
    return _json(_list_of(_any_call(tools, "parameters"), maxItems=max_calls))


def _list_of(items: dict[str, Any], **limits: int) -> dict[str, Any]:
    definitions = items.pop("$defs", None)
    schema = {"type": "array", "minItems": 1, **limits, "items": items}
    return schema if definitions is None else {**schema, "$defs": definitions}


def _any_call(
    tools: Sequence[ToolSchema], arguments_key: str, *, binds_all: bool = True
) -> dict[str, Any]:
    """A schema of one call, with the definitions that it refers to.

    A schema that refers to its own root moves to the definitions.
    `binds_all`: arguments of functions that are not strict follow their schemas, too.
    """
    definitions: dict[str, Any] = {}
    calls = []
    for index, tool in enumerate(tools):
        parameters: Any = tool.parameters if binds_all or tool.strict else {"type": "object"}
        key = f"call{index}"
        moved = _move_references(parameters, f"#/$defs/{key}")
        if moved != parameters:
            definitions[key] = moved
            parameters = {"$ref": f"#/$defs/{key}"}
        calls.append(_call(tool.name, parameters, arguments_key))
    schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return {**schema, "$defs": definitions} if definitions else schema


def strict_calls(tools: ToolUse, text: ModelText) -> Structured | None:
    """The constraint; None: the format of this model's calls cannot be constrained."""
    frame = None if text.family.tools is None else text.family.tools.frame
    has_special = frame is not None and not _is_text(text, frame)
    if frame is None or (has_special and not _begins_special(text, frame)):
        return None
    tags = [_tag(tool, frame) for tool in tools.schemas]
    tag: dict[str, Any] = {"type": "structural_tag", "structures": tags}
    tag |= {"triggers": [frame.marker], "has_special_tokens": has_special}
    return Structured(kind="structural_tag", text=msgspec.json.encode(tag).decode(), field="tools")


def _json(schema: dict[str, Any]) -> Structured:
    text = msgspec.json.encode(schema).decode()
    # If any whitespace were allowed, a weak model might write it without end.
    return Structured(kind="json", text=text, any_whitespace=False, field="tools")


def _call(name: str, parameters: Any, arguments_key: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"enum": [name]}, arguments_key: parameters},
        "required": ["name", arguments_key],
        "additionalProperties": False,
    }


def _move_references(value: Any, root: str) -> Any:
    """A copy of the schema whose references to its own root point to `root`."""

    def move(node: dict[str, Any]) -> dict[str, Any]:
        target = node.get("$ref")
        if not isinstance(target, str) or not target.startswith("#"):
            return node
        return {**node, "$ref": root + target[1:]}

    return changed_schema(value, move)


def _is_text(text: ModelText, frame: CallFrame) -> bool:
    """Return whether the frame has no special tokens."""
    vocabulary = text.vocabulary
    written = (vocabulary.marker_ids(mark) for mark in frame.marks if mark)
    return all(map(vocabulary.special_ids.isdisjoint, written))


def _begins_special(text: ModelText, frame: CallFrame) -> bool:
    first, *_ = text.vocabulary.marker_ids(frame.marks[0])
    return first in text.vocabulary.special_ids


def _tag(tool: ToolSchema, frame: CallFrame) -> dict[str, Any]:
    return {
        "begin": f"{frame.marker}{frame.before}{tool.name}{frame.after}",
        "schema": tool.parameters if tool.strict else {"type": "object"},
        "end": frame.end,
    }

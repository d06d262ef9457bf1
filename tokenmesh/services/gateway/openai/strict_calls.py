"""Strict functions that the model need not call: free text, but calls that follow the schemas.

Once the model has written its marker of a call, the rest of the call is bound: one of the
functions by name, and its arguments, those of functions that are not strict to be any object.
"""

from typing import Any

import msgspec

from tokenmesh.services.gateway.mesh.vocabularies import ModelText
from tokenmesh.services.gateway.openai.tool_use import ToolUse
from tokenmesh.services.gateway.parsers.formats import CallFrame
from tokenmesh.services.gateway.parsers.parser import ToolSchema
from tokenmesh.shared.messages.structured import Structured


def wants_strict_calls(tools: ToolUse) -> bool:
    """Whether a call that the model may make has to follow its schema."""
    return tools.mode == "auto" and any(tool.strict for tool in tools.schemas)


def strict_calls(tools: ToolUse, text: ModelText) -> Structured | None:
    """The constraint; None: this model's calls cannot be bound. Raises InvalidInput."""
    frame = None if text.family.tools is None else text.family.tools.frame
    if frame is None or not _is_text(text, frame):
        return None
    tags = [_tag(tool, frame) for tool in tools.schemas]
    tag = {"type": "structural_tag", "structures": tags, "triggers": [frame.marker]}
    structured = Structured(
        kind="structural_tag", text=msgspec.json.encode(tag).decode(), field="tools"
    )
    return structured


def _is_text(text: ModelText, frame: CallFrame) -> bool:
    """A grammar is of text, which special tokens have none of."""
    vocabulary = text.vocabulary
    written = vocabulary.encode(frame.marker + frame.before) + vocabulary.encode(frame.end)
    return vocabulary.special_ids.isdisjoint(written)


def _tag(tool: ToolSchema, frame: CallFrame) -> dict[str, Any]:
    return {
        "begin": f"{frame.marker}{frame.before}{tool.name}{frame.after}",
        "schema": tool.parameters if tool.strict else {"type": "object"},
        "end": frame.end,
    }

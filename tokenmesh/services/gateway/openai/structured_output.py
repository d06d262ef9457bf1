"""What a request says about the shape of its output, as workers take it."""

import json
from typing import Any

import msgspec

from tokenmesh.services.gateway.openai.structured_fields import ResponseFormat, StructuredOutputs
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.messages.structured import Structured


def read_structured(
    response_format: ResponseFormat | None,
    structured_outputs: StructuredOutputs | None,
) -> Structured | None:
    """The constraint, not yet checked; None: any text. Raises InvalidInput that names the field."""
    formatted = None if response_format is None else _of_format(response_format)
    structured = formatted
    if structured_outputs is not None:
        if formatted is not None:
            raise InvalidInput(
                "response_format and structured_outputs cannot both constrain the output",
                param="structured_outputs",
            )
        structured = _of_outputs(structured_outputs)
    return structured


def _of_format(asked: ResponseFormat) -> Structured | None:
    field = "response_format"
    if asked.type == "json_object":
        return Structured(kind="json_object", field=field)
    if asked.json_schema is not None:
        schema = asked.json_schema.json_schema
        return Structured(kind="json", text=_dump(schema), field=f"{field}.json_schema.schema")
    if asked.type == "structural_tag":
        tag = asked.model_dump(exclude_none=True)
        return Structured(kind="structural_tag", text=_dump(tag), field=field)
    return None


def _of_outputs(asked: StructuredOutputs) -> Structured:
    (name,) = asked.given
    field = f"structured_outputs.{name}"
    if asked.json_text is not None:
        schema = asked.json_text
        return Structured(
            kind="json",
            text=schema if isinstance(schema, str) else _dump(schema),
            any_whitespace=not asked.disable_any_whitespace,
            additional_properties=not asked.disable_additional_properties,
            whitespace_pattern=asked.whitespace_pattern,
            field=field,
        )
    if asked.json_object:
        return Structured(
            kind="json_object",
            any_whitespace=not asked.disable_any_whitespace,
            whitespace_pattern=asked.whitespace_pattern,
            field=field,
        )
    if asked.regex is not None:
        return Structured(kind="regex", text=asked.regex, field=field)
    if asked.choice is not None:
        return Structured(kind="choice", text=json.dumps(asked.choice), field=field)
    if asked.grammar is not None:
        return Structured(kind="grammar", text=asked.grammar, field=field)
    assert asked.structural_tag is not None
    return Structured(kind="structural_tag", text=asked.structural_tag, field=field)


def _dump(value: dict[str, Any]) -> str:
    return msgspec.json.encode(value).decode()

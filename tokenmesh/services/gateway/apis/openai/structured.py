"""response_format and structured_outputs: their shapes, and the constraint that workers get."""

import json
from typing import Any, Final, Literal, Self

import msgspec
from pydantic import Field, model_validator

from tokenmesh.services.gateway.core.http.fields import Bounded
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.messages.structured import Structured

CONSTRAINTS: Final = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""Exactly one of these is given in structured_outputs."""


class JsonSchemaFormat(Bounded, extra="forbid", strict=True):
    """OpenAI's `json_schema`. A schema is followed whether `strict` or not."""

    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Bounded, extra="forbid", strict=True):
    """OpenAI's, with vLLM's structural tags."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError("json_schema is only allowed with type json_schema")
        tag = (self.format, self.structures, self.triggers)
        if self.type != "structural_tag" and tag != (None, None, None):
            raise ValueError(
                "format, structures and triggers are only allowed with type structural_tag"
            )
        is_older = self.structures is not None and self.triggers is not None
        if self.type == "structural_tag" and is_older == (self.format is not None):
            raise ValueError("a structural_tag needs a format, or both structures and triggers")
        return self


class StructuredOutputs(Bounded, extra="forbid", strict=True, populate_by_name=True):
    """vLLM's: exactly one of the first six."""

    json_text: str | dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = Field(default=None, min_length=1)
    choice: list[str] | None = Field(default=None, min_length=1)
    grammar: str | None = Field(default=None, min_length=1)
    json_object: bool | None = None
    structural_tag: str | None = Field(default=None, min_length=1)
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if len(self.given) != 1:
            named = ", ".join(self.given) or "none"
            raise ValueError(f"exactly one of {', '.join(CONSTRAINTS)} must be set; got {named}")
        return self

    @property
    def given(self) -> list[str]:
        """Names of the constraints that are set."""
        values = (self.json_text, self.regex, self.choice, self.grammar)
        tag, is_object = self.structural_tag, self.json_object or None
        return [
            name
            for name, value in zip(CONSTRAINTS, (*values, is_object, tag), strict=True)
            if value is not None
        ]


def read_structured(
    response_format: ResponseFormat | None,
    structured_outputs: StructuredOutputs | None,
) -> Structured | None:
    """The constraint, not yet checked; None: any text. Raises InvalidInput."""
    formatted = None if response_format is None else _of_format(response_format)
    if structured_outputs is None:
        return formatted
    if formatted is not None:
        raise InvalidInput(
            "response_format and structured_outputs cannot both constrain the output",
            param="structured_outputs",
        )
    return _of_outputs(structured_outputs)


def _of_format(given: ResponseFormat) -> Structured | None:
    field = "response_format"
    if given.type == "json_object":
        return Structured(kind="json_object", field=field)
    if given.json_schema is not None:
        schema = given.json_schema.json_schema
        return Structured(kind="json", text=_dump(schema), field=f"{field}.json_schema.schema")
    if given.type == "structural_tag":
        tag = given.model_dump(exclude_none=True)
        return Structured(kind="structural_tag", text=_dump(tag), field=field)
    return None


def _of_outputs(given: StructuredOutputs) -> Structured:
    (name,) = given.given
    field = f"structured_outputs.{name}"
    if given.json_text is not None:
        schema = given.json_text
        return Structured(
            kind="json",
            text=schema if isinstance(schema, str) else _dump(schema),
            any_whitespace=not given.disable_any_whitespace,
            additional_properties=not given.disable_additional_properties,
            whitespace_pattern=given.whitespace_pattern,
            field=field,
        )
    if given.json_object:
        return Structured(
            kind="json_object",
            any_whitespace=not given.disable_any_whitespace,
            whitespace_pattern=given.whitespace_pattern,
            field=field,
        )
    if given.regex is not None:
        return Structured(kind="regex", text=given.regex, field=field)
    if given.choice is not None:
        return Structured(kind="choice", text=json.dumps(given.choice), field=field)
    if given.grammar is not None:
        return Structured(kind="grammar", text=given.grammar, field=field)
    assert given.structural_tag is not None
    return Structured(kind="structural_tag", text=given.structural_tag, field=field)


def _dump(value: dict[str, Any]) -> str:
    return msgspec.json.encode(value).decode()

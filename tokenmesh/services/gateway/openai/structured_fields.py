"""response_format and structured_outputs, checked field by field."""

from typing import Any, Final, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from tokenmesh.services.gateway.openai.bounded import Bounded

CONSTRAINTS: Final = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""The fields of structured_outputs of which a request has one."""


class JsonSchemaFormat(Bounded):
    """OpenAI's `json_schema`. A schema is followed whether `strict` or not."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Bounded):
    """OpenAI's, and the structural tags of vLLM."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        """What the type needs is there, and nothing that it has no use for."""
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError("json_schema goes with the type json_schema and no other")
        tag = (self.format, self.structures, self.triggers)
        if self.type != "structural_tag" and tag != (None, None, None):
            raise ValueError("format, structures and triggers go with the type structural_tag")
        is_older = self.structures is not None and self.triggers is not None
        if self.type == "structural_tag" and is_older == (self.format is not None):
            raise ValueError("a structural_tag has a format, or both structures and triggers")
        return self


class StructuredOutputs(Bounded):
    """vLLM's: exactly one of the first six."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)

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
        """Several constraints at a time would be several outputs."""
        if len(self.given) != 1:
            named = ", ".join(self.given) or "none"
            raise ValueError(f"exactly one of {', '.join(CONSTRAINTS)}; there is {named}")
        return self

    @property
    def given(self) -> list[str]:
        """Names of the constraints that are there."""
        values = (self.json_text, self.regex, self.choice, self.grammar)
        tag, is_object = self.structural_tag, self.json_object or None
        return [
            name
            for name, value in zip(CONSTRAINTS, (*values, is_object, tag), strict=True)
            if value is not None
        ]

"""StructuredLimits: how large schemas, expressions, grammars and tools may be."""

from pydantic import BaseModel, Field


class StructuredLimits(BaseModel):
    """A part of GatewaySettings. Sizes are bytes."""

    max_schema_bytes: int = Field(
        default=256 * 1024, ge=2, description="JSON schema, or choices, of structured output."
    )
    max_schema_depth: int = Field(default=64, ge=1, description="Nesting of such a schema's JSON.")
    max_schema_nodes: int = Field(
        default=20_000, ge=1, description="Parts (objects, lists, values) of such a schema."
    )
    max_structured_choices: int = Field(
        default=2048, ge=1, description="Strings of structured_outputs.choice."
    )
    max_grammar_bytes: int = Field(
        default=64 * 1024, ge=1, description="EBNF grammar or structural tag."
    )
    max_regex_chars: int = Field(
        default=4096, ge=1, description="Regular expression of structured output, or a pattern."
    )
    max_regex_depth: int = Field(default=32, ge=0, description="Nested groups of it.")
    max_regex_repetitions: int = Field(
        default=10_000, ge=1, description="What the counts of its nested repetitions multiply to."
    )
    max_tools: int = Field(default=512, ge=0, description="Functions in tools.")
    max_tools_bytes: int = Field(
        default=1024 * 1024, ge=0, description="Size of tools as JSON, all functions together."
    )
    max_forced_calls: int = Field(
        default=32,
        ge=1,
        description="Calls of one answer with tool_choice required; without a bound a model that "
        "has nothing to call may go on until its context is full.",
    )

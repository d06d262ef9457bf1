"""BodySettings: what the body of a request may hold, before it is read."""

from pydantic import BaseModel, Field


class BodySettings(BaseModel):
    """A part of GatewaySettings. Sizes are bytes."""

    max_body_bytes: int = Field(default=8 * 1024 * 1024, ge=1024, description="Largest JSON body.")
    max_json_depth: int = Field(default=64, ge=4, description="Deepest nesting of a JSON body.")
    max_json_values: int = Field(
        default=262_144,
        ge=16,
        description="Values in a JSON body: numbers, strings, lists and objects. Long lists of "
        "token ids are not counted.",
    )
    max_json_ids: int = Field(
        default=1_048_576, ge=1, description="Token ids in the long lists of a JSON body."
    )
    max_json_strings: int = Field(
        default=200_000, ge=16, description="Strings in a JSON body, names of fields included."
    )
    max_json_objects: int = Field(
        default=50_000, ge=4, description="Objects and lists in a JSON body."
    )

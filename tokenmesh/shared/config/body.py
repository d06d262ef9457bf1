"""BodySettings: what the body of a request may hold, before it is read."""

from pydantic import BaseModel, Field


class BodySettings(BaseModel):
    """A part of GatewaySettings. Sizes are bytes."""

    max_body_bytes: int = Field(default=8 * 1024 * 1024, ge=1024, description="Largest JSON body.")
    body_budget_bytes: int = Field(
        default=16 * 1024 * 1024,
        ge=64 * 1024,
        description="Bodies over 64 KiB together, from before they are read until their prompts "
        "are tokenized; of a tenant half of it. Others wait meanwhile.",
    )
    body_wait_s: float = Field(
        default=30.0, gt=0, description="How long a body waits for its share of that; then 429."
    )
    max_waiting_bodies: int = Field(
        default=128,
        ge=1,
        description="Bodies that wait; beyond it the tenant with the most of them gets a 429.",
    )
    max_json_depth: int = Field(default=64, ge=4, description="Deepest nesting of a JSON body.")
    max_json_values: int = Field(
        default=262_144,
        ge=16,
        description="Values in a JSON body: numbers, strings, lists and objects. Long lists of "
        "token ids are not counted.",
    )
    max_json_ids: int = Field(
        default=524_288, ge=1, description="Token ids in the long lists of a JSON body."
    )
    max_json_strings: int = Field(
        default=200_000, ge=16, description="Strings in a JSON body, names of fields included."
    )
    max_json_objects: int = Field(
        default=50_000, ge=4, description="Objects and lists in a JSON body."
    )

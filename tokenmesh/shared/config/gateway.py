"""GatewaySettings: the HTTP edge."""

from pydantic import BaseModel, ConfigDict, Field


class GatewaySettings(BaseModel):
    """One gateway process."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on.")
    api_key_hashes: tuple[str, ...] = Field(
        default=(), description="SHA-256 (hexadecimal) of each accepted API key; empty: no check."
    )

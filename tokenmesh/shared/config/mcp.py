"""McpServerSettings: an MCP server that requests of the Responses API may use by its label."""

from pydantic import BaseModel, ConfigDict, Field, SecretStr


class McpServerSettings(BaseModel):
    """Reached by Streamable HTTP."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str = Field(pattern="^https?://", description="Its endpoint.")
    headers: dict[str, SecretStr] = Field(
        default={}, description="Sent with every question; an authorization, say."
    )
    allowed_tools: tuple[str, ...] | None = Field(
        default=None, description="Tools that may be used at all; none given: every one."
    )

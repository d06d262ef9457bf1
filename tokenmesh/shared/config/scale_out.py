"""ScaleOutSettings: frontends and engines apart, with token ids between them."""

from pydantic import BaseModel, Field, model_validator


class ScaleOutSettings(BaseModel):
    """Part of GatewaySettings."""

    scale_out: bool = Field(
        default=False,
        description="Serve the render and derender routes, /inference/v1/generate and "
        "/inference/v1/abort_requests; otherwise they answer 403.",
    )
    render_only: bool = Field(
        default=False,
        description="Implies scale_out; /readyz needs a tokenizer and nothing else, for a frontend "
        "without workers.",
    )
    tokens_only: bool = Field(
        default=False,
        description="Implies scale_out; no tokenizer is asked: /readyz needs none, stop strings "
        "and text output are refused.",
    )
    inline_derender_tokens: int = Field(
        default=256,
        ge=0,
        description="Tokens up to which a derender request is processed on the event loop; more "
        "are processed in a thread.",
    )
    max_abort_requests: int = Field(
        default=1024,
        ge=1,
        description="Ids in one request to /inference/v1/abort_requests.",
    )

    @property
    def serves_scale_out(self) -> bool:
        """Whether the scale-out routes are enabled."""
        return self.scale_out or self.render_only or self.tokens_only

    @model_validator(mode="after")
    def _is_one_role(self) -> "ScaleOutSettings":
        if self.render_only and self.tokens_only:
            raise ValueError("render_only and tokens_only exclude each other")
        return self

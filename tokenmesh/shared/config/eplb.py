"""EplbConfig: how experts are moved between ranks, so that ranks have equally much to compute."""

from pydantic import BaseModel, ConfigDict, Field


class EplbConfig(BaseModel):
    """Names and meanings are those of vLLM's config of the same name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_redundant_experts: int = Field(
        default=0,
        ge=0,
        description="Further copies of the experts with most tokens, in each layer over all ranks; "
        "the ranks must divide it.",
    )
    step_interval: int = Field(
        default=3000, ge=1, description="Steps from one rebalance of the experts to the next."
    )
    window_size: int = Field(
        default=1000,
        ge=1,
        description="The last steps before a rebalance, whose tokens are counted by expert.",
    )

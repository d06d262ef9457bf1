"""EncoderSettings: batches and caches of mm_encoder_svc."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class EncoderSettings(BaseModel):
    """One encoder process. Times are seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Where the towers run; auto takes a GPU if there is one."
    )
    threads: int | None = Field(
        default=None, ge=1, description="torch threads; default: torch's own choice."
    )
    max_batch: int = Field(default=8, ge=1, description="Images in one forward pass.")
    batch_window_s: float = Field(
        default=0.002, ge=0, description="How long the first image of a batch waits for others."
    )
    queue: int = Field(
        default=256, ge=1, description="Images that wait for the tower; above: overloaded."
    )
    max_items: int = Field(default=256, ge=1, description="Media items in one request.")
    cache_bytes: int = Field(
        default=512 * 1024 * 1024, ge=0, description="Embeddings kept in this process."
    )
    blob_ttl_s: int = Field(
        default=900, ge=1, description="How long embeddings stay in Redis after their last use."
    )

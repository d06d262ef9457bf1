"""TenancySettings: keys, tenants, and how their limits are counted."""

from pathlib import Path

from pydantic import BaseModel, Field


class TenancySettings(BaseModel):
    """A part of GatewaySettings. Times are seconds, sizes bytes."""

    keys_file: Path | None = Field(
        default=None, description="TOML file of tenants and the hashes of their keys."
    )
    keys_refresh_s: float = Field(
        default=1.0, gt=0, description="How often that file is looked at for changes."
    )
    max_keys_file_bytes: int = Field(
        default=4 * 1024 * 1024, ge=1, description="Largest file of keys."
    )
    limits_timeout_s: float = Field(
        default=0.25, gt=0, description="Time for Redis to say whether a request may begin."
    )
    limits_retry_s: float = Field(
        default=1.0,
        gt=0,
        description="How long a gateway keeps limits by itself before it asks Redis again.",
    )
    last_usage_s: float = Field(
        default=5.0,
        ge=0,
        description="How long a leaving gateway that has usage to tell waits for Redis.",
    )
    lease_s: float = Field(
        default=30.0,
        gt=0,
        description="After this time a running request of a gateway that is gone counts no more.",
    )
    max_untold_leases: int = Field(
        default=65536, ge=1, description="Ended requests of a tenant that wait for Redis at most."
    )
    counted_responses_s: float = Field(
        default=3600.0,
        ge=1,
        description=(
            "How long Redis knows which kept responses are counted: who finds a dead gateway's "
            "response later than that counts it again."
        ),
    )
    max_usage_models: int = Field(
        default=256, ge=1, description="Models of a tenant's usage; further ones are one: other."
    )
    upload_bytes_per_tenant: int = Field(
        default=128 * 1024 * 1024,
        ge=0,
        description="Uploads of a tenant together; the key file may say max_upload_bytes for it.",
    )
    upload_bytes_total: int = Field(
        default=256 * 1024 * 1024,
        ge=0,
        description="Uploads of all tenants together: the rest of Redis' memory is for others.",
    )
    usage_kept_days: int = Field(
        default=400, ge=31, description="Days after its last request that usage of a month stays."
    )
    tenant_sweep_s: float = Field(
        default=3600.0,
        gt=0,
        description="How often a gateway deletes tenants' keys in Redis whose time has passed.",
    )
    separate_prefix_caches: bool = Field(
        default=False,
        description="A cached prefix serves the tenant that sent it only: nobody can tell by the "
        "time or by cached_tokens what others have asked.",
    )
    max_metric_tenants: int = Field(
        default=256, ge=0, description="Tenants with metrics of their own."
    )

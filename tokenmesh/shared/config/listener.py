"""ListenerSettings: where and how a gateway listens."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class ListenerSettings(BaseModel):
    """The address of a gateway. Flags bear vLLM's names."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on; 0: any.")
    uds: Path | None = Field(
        default=None, description="Unix socket to listen on instead of host and port."
    )
    reuse_port: bool = Field(
        default=False,
        description="Share the port with other gateways of this user on this machine that are "
        "set so; the kernel spreads connections over them (SO_REUSEPORT).",
    )
    backlog: int = Field(default=2048, ge=1, description="Connections that wait to be accepted.")
    keep_alive_s: int = Field(default=30, ge=1, description="How long an idle connection stays.")
    max_connections: int = Field(
        default=16384,
        ge=1,
        description="Connections at a time, where the system allows as many open files; more are "
        "answered 503.",
    )
    max_header_bytes: int = Field(
        default=64 * 1024, ge=1024, description="Largest header of a request, its URL included."
    )
    header_timeout_s: float = Field(
        default=20.0, gt=0, description="Receiving a request's header, also a connection's first."
    )
    linger_s: float = Field(
        default=2.0,
        gt=0,
        description="How long bytes are read and dropped after an answer that did not wait for "
        "the end of its request: a client that is still sending reads the answer first.",
    )
    linger_bytes: int = Field(
        default=32 * 1024 * 1024, ge=0, description="How many bytes are dropped so."
    )
    max_pipelined: int = Field(
        default=16,
        ge=0,
        description="Requests of a connection that wait for the answer to the one before; no more "
        "are read.",
    )
    refusal_log_interval_s: float = Field(
        default=60.0, gt=0, description="Refused connections of one kind are logged this often."
    )
    root_path: str = Field(
        default="", description="Path under which a proxy shows this server, such as /llm."
    )
    ssl_certfile: Path | None = Field(
        default=None, description="Certificate chain (PEM): serve HTTPS with it."
    )
    ssl_keyfile: Path | None = Field(default=None, description="Its private key (PEM).")
    ssl_ca_certs: Path | None = Field(
        default=None, description="Clients must show a certificate that one of these has signed."
    )
    handshake_timeout_s: float = Field(default=10.0, gt=0, description="Time for a TLS handshake.")
    max_handshakes: int = Field(
        default=512,
        ge=1,
        description="TLS handshakes at a time; beyond it the oldest silent one is closed, then "
        "the oldest.",
    )
    ssl_refresh_s: float = Field(
        default=60.0,
        ge=0,
        description="How often the certificate's files are looked at for a new one; 0: never.",
    )

    @property
    def is_on_loopback(self) -> bool:
        """Whether only this machine's own programs, browsers among them, reach the port."""
        if self.uds is not None:
            return False
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    @field_validator("root_path")
    @classmethod
    def _is_path(cls, path: str) -> str:
        if path and (not path.startswith("/") or path.endswith("/")):
            raise ValueError("begins with a slash and does not end with one")
        return path

    @model_validator(mode="after")
    def _has_certificate(self) -> "ListenerSettings":
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs):
            raise ValueError("ssl_keyfile and ssl_ca_certs need ssl_certfile")
        return self

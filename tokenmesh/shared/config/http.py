"""Settings of the gateway's listener, request bodies, websocket sessions and console."""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from tokenmesh.shared.config.fixed import fixed


class ListenerSettings(BaseModel):
    """The address of a gateway. Flags have vLLM's names."""

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
    backlog: int = fixed(default=2048, ge=1, description="Connections that wait to be accepted.")
    keep_alive_s: int = fixed(default=30, ge=1, description="How long an idle connection stays.")
    max_connections: int = Field(
        default=16384,
        ge=1,
        description="Connections at a time, where the system allows as many open files; more are "
        "answered 503.",
    )
    max_header_bytes: int = Field(
        default=64 * 1024, ge=1024, description="Largest header of a request, its URL included."
    )
    header_timeout_s: float = fixed(
        default=20.0, gt=0, description="Receiving a request's header, also a connection's first."
    )
    linger_s: float = fixed(
        default=2.0,
        gt=0,
        description="How long bytes are read and dropped after an answer that did not wait for "
        "the end of its request: a client that is still sending reads the answer first.",
    )
    linger_bytes: int = fixed(
        default=32 * 1024 * 1024, ge=0, description="How many bytes are dropped so."
    )
    max_pipelined: int = fixed(
        default=16,
        ge=0,
        description="Requests of a connection that wait for the answer to the one before; no more "
        "are read.",
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
    handshake_timeout_s: float = fixed(default=10.0, gt=0, description="Time for a TLS handshake.")
    max_handshakes: int = fixed(
        default=256,
        ge=1,
        description="TLS handshakes at a time; beyond it the oldest silent one is closed, then "
        "the oldest.",
    )
    ssl_refresh_s: float = fixed(
        default=60.0,
        ge=0,
        description="How often the certificate's files are looked at for a new one; 0: never.",
    )

    @property
    def is_on_loopback(self) -> bool:
        """Return whether only this machine's own programs, browsers among them, reach the port."""
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


class BodySettings(BaseModel):
    """A part of GatewaySettings. Sizes are bytes."""

    max_body_bytes: int = Field(default=8 * 1024 * 1024, ge=1024, description="Largest JSON body.")
    body_timeout_s: float = Field(default=60.0, gt=0, description="Receiving a request's body.")
    body_budget_bytes: int = Field(
        default=16 * 1024 * 1024,
        ge=64 * 1024,
        description="Bodies over 64 KiB together, from before they are read until their prompts "
        "are tokenized; of a tenant half of it. Others wait meanwhile.",
    )
    body_wait_s: float = fixed(
        default=30.0, gt=0, description="How long a body waits for its share of that; then 429."
    )
    max_waiting_bodies: int = fixed(
        default=128,
        ge=1,
        description="Bodies that wait; beyond it the tenant with the most of them gets a 429.",
    )
    max_json_depth: int = Field(default=64, ge=4, description="Deepest nesting of a JSON body.")
    max_json_values: int = Field(
        default=65_536,
        ge=16,
        description="Values in a JSON body: numbers, strings, lists and objects. Ids are not "
        "counted in lists, and in lists of lists, that take 1 KiB or more.",
    )
    max_json_ids: int = Field(
        default=524_288, ge=1, description="Token ids in these lists of a JSON body."
    )
    max_json_strings: int = Field(
        default=65_536, ge=16, description="Strings in a JSON body, names of fields included."
    )
    max_json_names: int = Field(
        default=20_480,
        ge=16,
        description="Names of fields in a JSON body: those that are unknown take most time.",
    )
    max_json_objects: int = Field(
        default=16_384, ge=4, description="Objects and lists in a JSON body."
    )


class UploadSettings(BaseModel):
    """Media that clients send; a part of GatewaySettings. Times are seconds, sizes bytes."""

    max_media_bytes: int = Field(
        default=20 * 1024 * 1024, ge=1024, description="Largest uploaded or inlined media item."
    )
    media_ttl_s: int = fixed(
        default=900, ge=1, description="How long media of a chat request stay in Redis."
    )
    file_ttl_s: int = fixed(
        default=24 * 3600, ge=1, description="How long an upload can be used after it was made."
    )
    max_file_bytes: int = Field(
        default=100 * 1024 * 1024,
        ge=1024,
        description="Largest upload; of an image for chats max_media_bytes.",
    )
    max_audio_bytes: int = Field(
        default=25 * 1024 * 1024, ge=1024, description="Largest file to be transcribed."
    )
    audio_timeout_s: float = fixed(
        default=60.0, gt=0, description="One try of decoding a recording, the wait included."
    )
    audio_clips: int = fixed(
        default=8,
        ge=1,
        le=64,
        description="Clips of one recording that are transcribed at a time, and whose features are "
        "in Redis.",
    )
    audio_temperatures: tuple[Annotated[float, Field(ge=0, le=2)], ...] = fixed(
        default=(0.0, 0.2, 0.4, 0.6, 0.8, 1.0),
        min_length=1,
        max_length=16,
        description="Temperatures of a clip, one after another until its transcript is plausible, "
        "where a request names none; not in streams.",
    )


class RealtimeSettings(BaseModel):
    """A part of GatewaySettings. Times are seconds, sizes bytes."""

    realtime_max_sessions: int = fixed(
        default=1024, ge=0, description="Realtime sessions of one gateway at a time; 0: none."
    )
    realtime_max_items: int = fixed(
        default=1024, ge=1, description="Items of one realtime session's conversation."
    )
    realtime_max_session_bytes: int = Field(
        default=8 * 1024 * 1024,
        ge=1024,
        description="Size of all items of a realtime session's conversation as JSON.",
    )
    realtime_max_message_bytes: int = fixed(
        default=4 * 1024 * 1024, ge=1024, description="Largest event that a realtime client sends."
    )
    realtime_max_audio_s: float = Field(
        default=60.0,
        gt=0,
        description="Audio of a realtime session that is not committed; longer speech is cut.",
    )
    realtime_max_recordings_bytes: int = fixed(
        default=32 * 1024 * 1024,
        ge=1024,
        description="Input audio in a realtime session's conversation, for models that hear it.",
    )
    realtime_idle_timeout_s: float = fixed(
        default=900.0, gt=0, description="A realtime session without an event or response ends."
    )
    realtime_session_timeout_s: float = fixed(
        default=3600.0, gt=0, description="Bound of a realtime session from its beginning."
    )
    realtime_ping_interval_s: float = fixed(
        default=20.0, gt=0, description="How often a realtime client is pinged."
    )
    realtime_ping_timeout_s: float = fixed(
        default=20.0,
        gt=0,
        description="Time for a realtime client to answer a ping; then it is disconnected.",
    )


class ConsoleSettings(BaseModel):
    """It holds what open pages of the console may cost."""

    max_console_pages: int = fixed(
        default=32, ge=0, description="Pages of the console that follow this gateway at a time."
    )
    max_console_pages_per_tenant: int = fixed(
        default=8, ge=0, description="Those of one tenant; more are answered 429."
    )
    console_interval_s: float = fixed(
        default=0.5, ge=0.1, description="How often they are sent what has changed."
    )
    max_console_rows: int = fixed(
        default=100,
        ge=1,
        description="Running requests, processes and tenants in one message to a page.",
    )

"""KvSettings: whether a worker exchanges KV with others and keeps it on disk, and by what."""

from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from tokenmesh.shared.config.fixed import fixed
from tokenmesh.shared.errors import ConfigError

KvRole = Literal["both", "prefill", "decode"]
LoadFailurePolicy = Literal["fail", "recompute"]
KvTransport = Literal["shm", "tcp", "nixl", "mooncake"]

_ANY_ADDRESS: Final = ("", "0.0.0.0", "::", "[::]")
_LAST_PORT: Final = 65535


class KvSettings(BaseModel):
    """A part of WorkerSettings. Names of vLLM mean what they mean there. Times are seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: KvRole | None = Field(
        default=None,
        description="KV is exchanged with other workers. prefill: it computes prompts for others, "
        "and serves clients only where nothing else lives; decode: others compute long prompts "
        "for it where that is faster; both. Default: none is exchanged.",
    )
    listen: str = Field(
        default="127.0.0.1:0",
        description="Where other workers read KV by TCP, which is not encrypted: an address that "
        "they reach and a port, 0 for any that is free. Those of the same user on the same machine "
        "read from shared memory instead.",
    )
    load_failure_policy: LoadFailurePolicy = Field(
        default="fail",
        description="When KV that was on its way does not come. fail: the request is placed again "
        "without that source; recompute: the worker computes it.",
    )
    transports: tuple[KvTransport, ...] = Field(
        default=("shm", "tcp"),
        min_length=1,
        description="How KV is read: the first one that reaches a source. shm: the memory of a "
        "worker of the same user on the same machine; tcp; nixl and mooncake: the libraries of "
        "that name, which must be installed and check no tokens, in a network that you trust.",
    )
    disk_dir: str | None = Field(
        default=None,
        description="Folder that keeps images of KV blocks on disk, besides the host tier, so that "
        "they survive a restart of the worker. Several workers may share it. Default: none.",
    )
    disk_size: float = Field(
        default=10.0,
        gt=0,
        description="GiB that a worker keeps in disk_dir; must be free at the start.",
    )
    mooncake_master: str | None = Field(
        default=None,
        description="Address and port of the master of a Mooncake store, which keeps images of KV "
        "blocks in memory of several machines; the library must be installed, and encrypts "
        "nothing. Default: none.",
    )
    mooncake_size: float = Field(
        default=1.0,
        ge=0,
        description="GiB of its memory that a worker lends to that store, in addition to its host "
        "tier; others read and write there.",
    )
    lease_s: float = fixed(
        default=10.0,
        gt=0,
        description="How long images are kept for a reader that is not heard of.",
    )
    transfer_s: float = fixed(
        default=2.0, gt=0, description="Deadline of a transfer, and a second for each 50 MB."
    )
    silent_s: float = fixed(
        default=1.0, gt=0, description="A source that does not answer for so long is given up."
    )

    @field_validator("listen")
    @classmethod
    def _is_reachable(cls, value: str) -> str:
        host, _, port = value.rpartition(":")
        if not port.isdecimal() or int(port) > _LAST_PORT:
            raise ValueError("should be an address and a port, such as 10.0.0.7:9400")
        if host in _ANY_ADDRESS:
            raise ValueError("should be an address that other workers reach, not any address")
        return value

    @field_validator("mooncake_master")
    @classmethod
    def _is_address(cls, value: str | None) -> str | None:
        host, _, port = (value or "a:1").rpartition(":")
        if not host or not port.isdecimal() or int(port) > _LAST_PORT:
            raise ValueError("should be an address and a port, such as 10.0.0.7:50051")
        return value

    @property
    def is_used(self) -> bool:
        """True where a process moves images: to other workers or to a store."""
        return self.role is not None or self.has_stores

    @property
    def stores(self) -> tuple[str, ...]:
        """Return where images are kept outside of workers."""
        given = {"disk": self.disk_dir, "mooncake": self.mooncake_master}
        return tuple(name for name, value in given.items() if value is not None)

    @property
    def has_stores(self) -> bool:
        """True where images are kept outside of workers."""
        return bool(self.stores)

    @property
    def used_transports(self) -> tuple[KvTransport, ...]:
        """None where nothing is exchanged with other workers."""
        return self.transports if self.role is not None else ()

    @property
    def disk_bytes(self) -> int:
        return int(self.disk_size * (1 << 30))

    def check_encryption(self, bus_url: str) -> None:
        """Raise ConfigError where the mesh encrypts and KV would leave the machine in the clear."""
        is_local = self.host in ("localhost", "::1") or self.host.startswith("127.")
        leaves = set(self.used_transports) - {"shm"} and not is_local
        if leaves and bus_url.startswith("tls://"):
            raise ConfigError(
                f"the bus is encrypted (bus.url) and KV at {self.listen} would not be: there is no "
                "TLS for it. Let it listen on a loopback address, or set kv.transports to shm",
                param="worker.kv.listen",
            )

    @property
    def host(self) -> str:
        return self.listen.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.listen.rpartition(":")[2])

"""The table of services. A new service is a line here, its package and its settings.

The command line, `up`, heartbeats, queue groups and metrics of members read this table. The extra
in pyproject.toml and the stage of the Dockerfile have the service's name.
"""

from dataclasses import dataclass
from typing import Final, Literal


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    name: str
    """On the command line, in ids of instances, spans and metrics; also its queue group."""
    package: str
    """Below `tokenmesh.services`; its module `main` has `run(settings) -> int`."""
    verb: str = ""
    """`tm.<verb>.<model>` is the subject of requests that any instance answers; empty: none."""
    heartbeats: Literal["all", "gateways", "none"] = "none"
    """Heartbeats that it receives. `gateways` includes its own: workers are many and publish most,
    so each of them reading all would grow as the square."""
    beats_often: bool = False
    """Publishes at `service.worker_beat_interval_s` instead of `service.beat_interval_s`."""
    computes: bool = False
    """Its threads compute: under `up` such processes share the cores."""
    library: str = ""
    """A module that only its extra in pyproject.toml installs; empty: it needs no extra."""
    faces_clients: bool = False
    """Listens on `gateway.port` and stops before the other services."""

    @property
    def module(self) -> str:
        """The module of its process."""
        return f"tokenmesh.services.{self.package}.main"

    @property
    def count_setting(self) -> str:
        """The field of `UpSettings` with its number of processes; workers: for each model."""
        return f"{self.name}s"


SERVICES: Final = (
    ServiceSpec("scheduler", "scheduler_svc", verb="place", heartbeats="all"),
    ServiceSpec("tokenizer", "tokenizer_svc", verb="tokenize", library="transformers"),
    ServiceSpec("encoder", "mm_encoder_svc", verb="encode", computes=True, library="torch"),
    ServiceSpec(
        "worker",
        "worker_svc",
        heartbeats="gateways",
        beats_often=True,
        computes=True,
        library="torch",
    ),
    ServiceSpec("gateway", "gateway", heartbeats="all", faces_clients=True, library="fastapi"),
)
"""In the order in which `up` starts them."""

SERVICE_BY_NAME: Final = {spec.name: spec for spec in SERVICES}

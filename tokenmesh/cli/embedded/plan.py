"""From settings to the processes of an embedded mesh, and checks before any of them starts."""

import json
import os
import secrets
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from tokenmesh.cli.embedded.child import ChildSpec, Phase
from tokenmesh.cli.embedded.gpus import assign_gpus, overfull, visible_gpus
from tokenmesh.cli.embedded.ports import LOOPBACK, free_port
from tokenmesh.cli.embedded.private import write_private
from tokenmesh.cli.embedded.screen import Screen
from tokenmesh.cli.embedded.servers import STORE, nats_server, redis_server
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.environment import notify_environment
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.config.layers import environment_name
from tokenmesh.shared.config.loader import changed, plain_values
from tokenmesh.shared.ctranslate2 import Ct2File, is_ctranslate2
from tokenmesh.shared.errors import CheckpointError, ConfigError
from tokenmesh.shared.gguf import is_gguf
from tokenmesh.shared.gguf.reader import MAGIC
from tokenmesh.shared.placeholder_files import placeholder_problem
from tokenmesh.shared.rights import ADMIN, EVENTS, SERVICE_USERS, UP
from tokenmesh.shared.services import SERVICES, ServiceSpec

_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
_PATH_STARTS: Final = ("/", "./", "../", "~")


def check_installed() -> None:
    """Raises ConfigError when the package was installed without its services."""
    missing = {spec.library for spec in SERVICES if spec.library and not find_spec(spec.library)}
    if missing:
        raise ConfigError(
            f"`tokenmesh up` needs {', '.join(sorted(missing))}: install tokenmesh-server with its "
            "extra `cpu`, or `gpu` on a machine with an NVIDIA GPU"
        )


def check_models(settings: Settings) -> None:
    """Raises ConfigError for a local path that is not a checkpoint.

    What may be a hub id is left to the services.
    """
    for model in settings.models:
        path = Path(model.model).expanduser()
        if not path.exists():
            if model.model.startswith(_PATH_STARTS):
                raise ConfigError(f"{model.model}: no such directory", param="--model")
        elif path.is_file():
            check_file(model.model, path)
        elif not (path / "config.json").is_file():
            raise ConfigError(
                f"{model.model} is not a checkpoint: it has no config.json", param="--model"
            )
        elif is_ctranslate2(path):
            check_contents(path)


def check_file(name: str, path: Path) -> None:
    """Raises ConfigError for a file that is not a GGUF file."""
    with path.open("rb") as file:
        is_ours = is_gguf(path) and file.read(len(MAGIC)) == MAGIC
    if not is_ours:
        what = "a model is a directory, a GGUF file (.gguf) or a hub id"
        what = placeholder_problem(path) or what
        raise ConfigError(f"{name} is not a GGUF file; {what}", param="--model")


def check_contents(directory: Path) -> None:
    """Raises ConfigError for a directory of CTranslate2 whose file is broken or of another version.

    The services read more of it.
    """
    try:
        Ct2File.read(directory)
    except CheckpointError as error:
        raise ConfigError(error.message, param="--model") from error


def check_address(settings: Settings) -> None:
    """Raises ConfigError when the gateways could not share what they listen on."""
    if settings.gateway.uds is not None and settings.up.gateways > 1:
        raise ConfigError(
            f"--uds is for one gateway, and --gateways is {settings.up.gateways}: a Unix socket "
            "cannot be shared",
            param="--uds",
        )


def check_store(settings: Settings) -> None:
    """Raises ConfigError when the embedded NATS could not hold what the settings let it store."""
    if "url" in settings.bus.model_fields_set:
        return
    parts = {
        "responses.max_total_bytes": settings.responses.max_total_bytes,
        "gateway.upload_bytes_total": settings.gateway.upload_disk_bytes,
        "batches.max_total_bytes": settings.batches.disk_bytes,
    }
    needed, most = sum(parts.values()), settings.up.nats_store_bytes
    if needed > most:
        what = ", ".join(f"{num_bytes} by {name}" for name, num_bytes in parts.items())
        raise ConfigError(
            f"up.nats_store_bytes is {most}, and NATS has to store up to {needed} bytes: {what}",
            param="up.nats_store_bytes",
        )


def warn_if_open(gateway: GatewaySettings, screen: Screen) -> None:
    """Warn when other machines reach the API and no key guards it."""
    has_keys = bool(gateway.api_key_hashes or gateway.keys_file)
    if gateway.host not in _LOOPBACK and not has_keys:
        what = "use this mesh and put it to sleep" if gateway.admin_routes else "use this mesh"
        screen.warn(
            f"everyone who can reach {gateway.host} may {what}: set --api-key or --keys-file"
        )


def warn_if_overfull(settings: Settings, screen: Screen) -> None:
    """Warn when workers would find too little memory on the GPU that they share."""
    text = overfull(settings, all_workers(settings) * _num_awake(settings), visible_gpus())
    if text is not None:
        screen.warn(text)


_FRONTEND: Final = ("tokenizer", "gateway")
"""The services that are started where prompts are only rendered."""
_ENGINE: Final = ("torch", "tokenmesh.engine.exec.build_any")
"""A service that computes imports these later than its module."""
NOTIFY_SOCKET: Final = "notify"
"""The file name of the socket on which services report to `up`."""
_PASSWORD_BYTES: Final = 24


@dataclass(frozen=True)
class MeshPlan:
    """The processes to start, and the settings with which the services find each other."""

    settings: Settings
    """Those of `up` itself; a service's file also has its user of each embedded server."""
    servers: tuple[ChildSpec, ...]
    services: tuple[ChildSpec, ...]
    events_url: Path | None = None
    """The file with the URL for subscribers to block events; None: no block events, or the
    operator's own NATS has the accounts."""
    store: Path | None = None
    """Where the embedded NATS keeps its streams; None: NATS is not embedded."""

    @property
    def counts(self) -> dict[str, int]:
        """The number of processes of each service."""
        return dict(Counter(spec.service for spec in self.services))


def make_plan(settings: Settings, folder: Path, *, with_admin: bool = False) -> MeshPlan:
    """Write the configuration files to `folder` and list the processes.

    A server whose URL is configured is joined, not started. With `with_admin` the plan's settings
    have a user with all rights.
    """
    own = ADMIN if with_admin else UP
    servers: list[ChildSpec] = []
    events_url: Path | None = None
    store: Path | None = None
    skips = len(settings.models) > 1 and not settings.up.strict
    changes: dict[str, dict[str, object]] = {
        "service": {"exit_with_parent": True, "skip_broken_models": skips}
    }
    passwords = {user: secrets.token_hex(_PASSWORD_BYTES) for user in (*SERVICE_USERS, own)}
    credentials: dict[str, dict[str, object]] = {user: {} for user in passwords}
    if "url" not in settings.bus.model_fields_set:
        port, store = free_port(), folder / STORE
        users = dict(passwords)
        if settings.block_events.enabled:
            users[EVENTS] = secrets.token_hex(_PASSWORD_BYTES)
            url = f"nats://{EVENTS}:{users[EVENTS]}@{LOOPBACK}:{port}\n"
            events_url = write_private(folder / "events-url", url)
        servers.append(nats_server(folder, settings.up, port, users))
        changes["bus"] = {"url": f"nats://{LOOPBACK}:{port}"}
        for user, password in passwords.items():
            credentials[user]["bus"] = {"user": user, "password": password}
    if "url" not in settings.redis.model_fields_set:
        port = free_port()
        redis_names = [user for user in passwords if user != UP]
        users = {user: passwords[user] for user in redis_names}
        servers.append(redis_server(folder, settings.up, port, users))
        changes["redis"] = {"url": f"redis://{LOOPBACK}:{port}/0"}
        for user in redis_names:
            credentials[user]["redis"] = {"user": user, "password": passwords[user]}
    if settings.up.gateways > 1:
        changes["gateway"] = {"reuse_port": True}
    if any(model.on_demand for model in settings.models):
        changes["worker"] = {"on_demand": _slots(settings, folder)}
    settings = changed(settings, changes)
    services = tuple(_services(settings, credentials, folder))
    settings = changed(settings, credentials[own])
    return MeshPlan(settings, tuple(servers), services, events_url, store)


def _slots(settings: Settings, folder: Path) -> dict[str, object]:
    """Bound the workers on demand that are awake, unless the settings name a directory."""
    if settings.worker.on_demand.slots_dir is not None:
        return {}
    slots = folder / "awake"
    slots.mkdir(mode=0o700)
    return {"slots_dir": slots, "max_awake": settings.up.max_awake_models * all_workers(settings)}


def _services(
    settings: Settings, credentials: Mapping[str, Mapping[str, object]], folder: Path
) -> Iterator[ChildSpec]:
    up, num_workers = settings.up, all_workers(settings)
    num_models = len(models_run(settings))
    threads = max(1, len(os.sched_getaffinity(0)) // (num_workers * _num_awake(settings)))
    visible = visible_gpus()
    gpus = assign_gpus(settings, num_workers * num_models, visible)
    for spec in SERVICES:
        service, count = spec.name, getattr(up, spec.count_setting)
        if settings.gateway.render_only and service not in _FRONTEND:
            continue
        if service == "encoder" and _takes_text_only(settings):
            continue
        if service == "worker":
            count = num_workers * num_models
        # JSON lines let `up` show a child's message alone.
        changes = {"telemetry": {"log_format": "json"}, **credentials[service]}
        values = plain_values(changed(settings, changes))
        config = write_private(folder / f"{service}-services.json", json.dumps(values))
        # -P: what lies in the user's folder must not be imported instead of a library.
        command = (
            sys.executable,
            "-P",
            "-m",
            "tokenmesh",
            "serve",
            service,
            "--config",
            str(config),
        )
        phase = Phase.EDGE if spec.faces_clients else Phase.MESH
        for number in range(1, count + 1):
            name = f"{service} {number}" if count > 1 else service
            environment = {}
            if spec.computes:  # these share the cores
                environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(threads))
            environment |= notify_environment(str(folder / NOTIFY_SOCKET), up.hung_s)
            model = _model_of_worker(settings, number - 1) if service == "worker" else None
            if model is not None:
                environment[environment_name(("worker", "model"))] = model
            if service == "worker" and up.prefill_workers:
                # the models take turns: the first of each decode
                role = "decode" if number <= up.workers * num_models else "prefill"
                environment[environment_name(("worker", "kv", "role"))] = role
            if service in gpus:
                environment |= gpus[service][number - 1]
            imports = _imports(settings, spec, visible)
            yield ChildSpec(name, command, phase, environment, model=model, imports=imports)


def _imports(settings: Settings, spec: ServiceSpec, gpus: Sequence[str]) -> tuple[str, ...]:
    """The modules to share with other services by a fork: a GPU's driver does not survive one, and
    a simulated engine imports no torch."""
    if not spec.computes or gpus or settings.worker.engine == "sim":
        return ()
    return (spec.module, *_ENGINE)


def _takes_text_only(settings: Settings) -> bool:
    """Return whether no encoder could ever be asked, and the user wants none all the same."""
    return "encoders" not in settings.up.model_fields_set and all(
        model.language_model_only or is_gguf(Path(model.model).expanduser())
        for model in settings.models
    )


def all_workers(settings: Settings) -> int:
    """Workers of each model."""
    return settings.up.workers + settings.up.prefill_workers


def models_run(settings: Settings) -> tuple[str, ...]:
    """The models that workers are started for: all, or the one that `worker.model` names."""
    names = tuple(model.name for model in settings.models)
    wanted = settings.worker.model
    return names if wanted is None else (wanted,)


def _num_awake(settings: Settings) -> int:
    """Models that compute at a time."""
    names = models_run(settings)
    on_demand = sum(model.on_demand for model in settings.models if model.name in names)
    return max(1, len(names) - on_demand + min(on_demand, settings.up.max_awake_models))


def _model_of_worker(settings: Settings, index: int) -> str | None:
    """A worker runs one model: the models take turns. None where there is one."""
    names = models_run(settings)
    return None if len(settings.models) == 1 else names[index % len(names)]

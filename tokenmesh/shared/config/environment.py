"""Environment variables besides settings: the notify protocol, the cache, a sandboxed child's."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Final

from tokenmesh.shared.errors import ConfigError

SOCKET: Final = "NOTIFY_SOCKET"
WATCHDOG_US: Final = "WATCHDOG_USEC"
WATCHDOG_PID: Final = "WATCHDOG_PID"
VARIABLES: Final = frozenset((SOCKET, WATCHDOG_US, WATCHDOG_PID))
_US: Final = 1_000_000


@dataclass(frozen=True)
class NotifyTarget:
    """A supervisor that listens on a datagram socket."""

    address: str
    silence_s: float | None
    """It says how long it lets the process be silent; None: it does not watch."""


def notify_target(environment: Mapping[str, str] = os.environ) -> NotifyTarget | None:
    """The target in the environment; None: no supervisor listens."""
    address = environment.get(SOCKET, "")
    if not address.startswith(("/", "@")):
        return None
    # An address with @ is in Linux' abstract namespace.
    address = "\0" + address[1:] if address[0] == "@" else address
    silence, process = environment.get(WATCHDOG_US, ""), environment.get(WATCHDOG_PID)
    is_watched = silence.isdecimal() and int(silence) > 0 and process in (None, str(os.getpid()))
    return NotifyTarget(address, int(silence) / _US if is_watched else None)


def notify_environment(address: str, silence_s: float) -> dict[str, str]:
    """The variables for a child that shall report to `address`."""
    return {SOCKET: address, WATCHDOG_US: str(int(silence_s * _US))}


_START_DATE: Final = "VLLM_SYSTEM_START_DATE"


def start_date() -> date | None:
    """The day that vLLM's variable names as today for prompts; None: the clock decides.

    Raises ConfigError for any other text.
    """
    text = os.environ.get(_START_DATE)
    if not text:
        return None
    try:
        return date.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(f"{_START_DATE} = {text!r}: should be a day, YYYY-MM-DD") from error


_CACHE: Final = "XDG_CACHE_HOME"


def cache_folder() -> Path:
    """Where this program keeps what can be downloaded again."""
    # An empty or relative value is ignored, as the XDG specification demands.
    base = Path(os.environ.get(_CACHE, ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "tokenmesh"


_INDEX_VARIABLES: Final = {
    "index-url": ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL"),
    "extra-index-url": ("PIP_EXTRA_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL"),
    "no-index": ("PIP_NO_INDEX", "UV_NO_INDEX"),
    "cert": ("PIP_CERT",),
    "proxy": ("PIP_PROXY",),
}


def package_index_variables() -> dict[str, str]:
    """By pip's option: what variables of pip and uv say about where packages come from."""
    found: dict[str, str] = {}
    for option, names in _INDEX_VARIABLES.items():
        text = next((os.environ[name] for name in names if os.environ.get(name)), None)
        if text is not None:
            found[option] = text
    return found


_KEPT: Final = frozenset(
    (
        *("HOME", "LANG", "LANGUAGE", "LD_LIBRARY_PATH", "PATH", "TMPDIR", "TZ", "VIRTUAL_ENV"),
        _START_DATE,
    )
)
_KEPT_PREFIXES: Final = ("GOMP_", "LC_", "MKL_", "OMP_", "PYTHON")


def sandbox_environment() -> dict[str, str]:
    """Return what an interpreter and its libraries need of this process's environment, and no
    more.
    """
    return {
        name: text
        for name, text in os.environ.items()
        if name in _KEPT or name.startswith(_KEPT_PREFIXES)
    }


_TRANSFER_PREFIXES: Final = ("MC_", "NIXL_", "UCX_")


def transfer_environment() -> dict[str, str]:
    """Variables of libraries that move KV, such as which network devices they use."""
    found = {key: text for key, text in os.environ.items() if key.startswith(_TRANSFER_PREFIXES)}
    # Mooncake waits for a source that stands still for 30 s unless it hears otherwise
    quick = dict.fromkeys(("MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_TCP_STATUS_TIMEOUT_SEC"), "2")
    return {"NIXL_LOG_LEVEL": "WARN", "MC_LOG_LEVEL": "WARNING", **quick, **found}


_RANK: Final = "RANK"
_PLACE: Final = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_AGENT_STORE: Final = "TORCHELASTIC_USE_AGENT_STORE"
_RESTARTS: Final = "TORCHELASTIC_RESTART_COUNT"


@dataclass(frozen=True)
class RankPlace:
    """Where a process stands in a group of ranks, in torchrun's variables."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    host: str
    """This is the address of the store where ranks find each other."""
    port: int
    has_store: bool = False
    """It tells whether what started the ranks serves the store."""
    restarts: int = 0
    """It says how many times all ranks were started before."""


def rank_place(environment: Mapping[str, str] = os.environ) -> RankPlace | None:
    """The place in the environment; None: this process was not started as a rank.

    Raises ConfigError for variables that are missing or no numbers.
    """
    if _RANK not in environment:
        return None
    missing = [name for name in _PLACE if not environment.get(name)]
    if missing:
        raise ConfigError(f"{_RANK} is set, and {', '.join(missing)} should be as well")
    names = (_RANK, *_PLACE[:3], _PLACE[4])
    numbers = [environment[name] for name in names]
    wrong = [name for name, text in zip(names, numbers, strict=True) if not text.isdecimal()]
    if wrong:
        raise ConfigError(f"{', '.join(wrong)} should be numbers")
    rank, world, local_rank, local_world, port = map(int, numbers)
    return RankPlace(
        rank,
        world,
        local_rank,
        local_world,
        environment[_PLACE[3]],
        port,
        environment.get(_AGENT_STORE) == "True",
        int(environment.get(_RESTARTS, "0")),
    )


def rank_environment(
    place: RankPlace, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The environment of a process that shall be the rank of a place."""
    values = (place.world, place.local_rank, place.local_world, place.host, place.port)
    own = {_RANK: str(place.rank), **dict(zip(_PLACE, map(str, values), strict=True))}
    return {**environment, **own}

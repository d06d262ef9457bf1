"""Options of every load, and the BenchRun that they describe."""

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from tokenmesh.cli.api import DEFAULT_URL, URL_VARIABLES
from tokenmesh.cli.bench.report import METRICS, read_goals
from tokenmesh.cli.bench.run import BenchRun
from tokenmesh.cli.bench.workload import Endpoint, RandomPrompts
from tokenmesh.shared.errors import ConfigError

_RANDOM: Final = "random"
_BACKENDS: Final[dict[str, Endpoint]] = {
    "openai": "completions",
    "vllm": "completions",
    "openai-chat": "chat",
    "openai-audio": "transcriptions",
}
_PATH_ENDS: Final[dict[Endpoint, tuple[str, ...]]] = {
    "completions": ("completions",),
    "chat": ("chat/completions",),
    "transcriptions": ("transcriptions", "translations"),
}
"""The ends of paths that --endpoint may have."""


_GIVEN: Final = ("load", "api_key", "goals", "variants")
"""Parameters of a command that are no options of it."""
_NAME: Final = "_benchmark_name"
"""The name of settings in a file, as vLLM's."""
_NOT_VARIED: Final = ("api_key", "goodput")


def option(help_text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help_text, **more)


_LOAD: Final[tuple[tuple[str, Any, Any, Any], ...]] = (
    ("base_url", str, DEFAULT_URL, option("The server.", "--base-url", envvar=URL_VARIABLES)),
    (
        "backend",
        str,
        "openai",
        option(
            "openai (completions of token ids), vllm (the same), openai-chat or openai-audio.",
            "--backend",
        ),
    ),
    ("path", str | None, None, option("Path of the requests; that of --backend.", "--endpoint")),
    ("model", str | None, None, option("Default: the first that the server lists.", "--model")),
    ("api_key", str | None, None, option("API key.", "--api-key", envvar="OPENAI_API_KEY")),
    (
        "dataset_name",
        str,
        _RANDOM,
        option("random, or sharegpt or custom with --dataset-path.", "--dataset-name"),
    ),
    (
        "dataset_path",
        Path | None,
        None,
        option(
            "ShareGPT's JSON, JSON lines with `prompt`, or recordings: a folder or JSON lines.",
            "--dataset-path",
        ),
    ),
    ("num_prompts", int, 100, option("Requests to measure.", "--num-prompts", min=1)),
    (
        "burstiness",
        float,
        1.0,
        option("1: Poisson; less: bursts; more: even gaps.", "--burstiness", min=0.01),
    ),
    (
        "max_concurrency",
        int,
        64,
        option("Most requests at a time.", "--max-concurrency", "--concurrency", min=1),
    ),
    (
        "input_len",
        int,
        128,
        option("Prompt tokens (random).", "--random-input-len", "--input-len", min=1),
    ),
    (
        "output_len",
        int,
        64,
        option("Output tokens of a request.", "--random-output-len", "--output-len", min=1),
    ),
    (
        "range_ratio",
        float,
        0.0,
        option("Lengths vary by this share (random).", "--random-range-ratio", min=0, max=1),
    ),
    (
        "prefix_len",
        int,
        0,
        option("Tokens that all prompts share (random).", "--random-prefix-len", min=0),
    ),
    ("num_warmups", int, 2, option("Requests before the measurement.", "--num-warmups", min=0)),
    ("temperature", float, 0.0, option("Sampling temperature.", "--temperature", min=0)),
    (
        "ignore_eos",
        bool,
        True,
        option("Answers of the full length.", "--ignore-eos/--no-ignore-eos"),
    ),
    ("timeout", float, 300.0, option("Seconds for one request.", "--timeout", min=0.1)),
    ("seed", int, 0, option("Of prompts and arrival times.", "--seed")),
    (
        "goodput",
        list[str] | None,
        None,
        option(f"Goals in ms, such as ttft:500 tpot:50 ({', '.join(METRICS)}).", "--goodput"),
    ),
)
"""Options of every load: parameter, type, default, and how they are shown."""


Variants = Callable[[Path], dict[str, BenchRun]]
"""Reads a file of settings: a load for each of them, by its name. Raises ConfigError."""


def with_load(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of a load; it receives them as `load`, `api_key` and `goals`.

    One that has a parameter `variants` receives a function that varies the load.
    """
    own = inspect.signature(command).parameters.values()
    does_vary = any(each.name == "variants" for each in own)

    def run(**values: Any) -> None:
        given = {name: values.pop(name) for name, *_ in _LOAD}
        goals = checked(read_goals, given.pop("goodput") or ())
        api_key = given.pop("api_key")
        if does_vary:
            values["variants"] = lambda path: _variants(path, given)
        command(api_key=api_key, load=_load(given), goals=goals, **values)

    parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[kind, option],
        )
        for name, kind, default, option in _LOAD
    ]
    parameters += [each for each in own if each.name not in _GIVEN]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _variants(path: Path, given: dict[str, Any]) -> dict[str, BenchRun]:
    found: dict[str, BenchRun] = {}
    for number, settings in enumerate(_settings(path), 1):
        name = str(settings.pop(_NAME, "")) or ", ".join(f"{k}={v}" for k, v in settings.items())
        if name in found:
            raise ConfigError(f"--bench-params {path}: there are two settings {name!r}")
        try:
            found[name] = _load(given | dict(_setting(*each) for each in settings.items()))
        except (ValueError, ConfigError) as error:
            raise ConfigError(f"--bench-params {path}: entry {number}: {error}") from error
    return found


def _settings(path: Path) -> list[dict[str, Any]]:
    """The entries of a list, or of an object whose keys are their names."""
    try:
        entries = msgspec.json.decode(
            path.read_bytes(), type=list[dict[str, Any]] | dict[str, dict[str, Any]]
        )
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"--bench-params {path}: not a JSON list of settings: {error}", param="--bench-params"
        ) from error
    if isinstance(entries, dict):
        entries = [{_NAME: name, **settings} for name, settings in entries.items()]
    if not entries:
        raise ConfigError(f"--bench-params {path}: it holds no settings", param="--bench-params")
    return entries


def _setting(name: str, value: object) -> tuple[str, Any]:
    """Parameter and value of an option of a load. Raises ValueError."""
    flag = "--" + name.replace("_", "-")
    for parameter, kind, _, shown in _LOAD:
        # of an annotation, typer keeps the first name as the default
        flags = [each.partition("/")[0] for each in (shown.default, *(shown.param_decls or ()))]
        if flag not in flags or parameter in _NOT_VARIED:
            continue
        try:
            found = msgspec.convert(value, kind, dec_hook=lambda to, text: to(text))
        except (msgspec.ValidationError, TypeError) as error:
            raise ValueError(f"{name}: {error}") from error
        if shown.min is not None and found < shown.min:
            raise ValueError(f"{name}: {found} is below {shown.min}")
        if shown.max is not None and found > shown.max:
            raise ValueError(f"{name}: {found} is above {shown.max}")
        return parameter, found
    raise ValueError(f"{name} is not an option of a load that can vary")


def checked(read: Any, text: Any) -> Any:
    try:
        return read(text)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _load(options: dict[str, Any]) -> BenchRun:
    given = dict(options)
    prompts = RandomPrompts(
        given.pop("input_len"),
        given.pop("output_len"),
        given.pop("range_ratio"),
        given.pop("prefix_len"),
    )
    endpoint = _endpoint(given.pop("backend"), given["path"])
    return BenchRun(
        endpoint=endpoint,
        dataset=_dataset(given.pop("dataset_name"), given.pop("dataset_path"), endpoint),
        timeout_s=given.pop("timeout"),
        prompts=prompts,
        request_rate=math.inf,
        **given,
    )


def _endpoint(backend: str, path: str | None) -> Endpoint:
    endpoint = _BACKENDS.get(backend)
    if endpoint is None:
        names = ", ".join(_BACKENDS)
        raise ConfigError(f"--backend {backend}: not one of {names}", param="--backend")
    ends = _PATH_ENDS[endpoint]
    if path is not None and not (path.startswith("/") and path.endswith(ends)):
        raise ConfigError(
            f"--endpoint {path}: with --backend {backend} a path that ends with "
            f"{' or '.join(ends)}",
            param="--endpoint",
        )
    return endpoint


def _dataset(name: str, path: Path | None, endpoint: Endpoint) -> Path | None:
    if name not in (_RANDOM, "sharegpt", "custom"):
        raise ConfigError(
            f"--dataset-name {name}: not random, sharegpt or custom", param="--dataset-name"
        )
    if (name == _RANDOM) != (path is None):
        raise ConfigError("--dataset-path goes with --dataset-name sharegpt or custom")
    is_audio = endpoint == "transcriptions"
    if is_audio and name != "custom":
        raise ConfigError("--backend openai-audio needs --dataset-name custom and --dataset-path")
    if path is not None and not (path.is_file() or (is_audio and path.is_dir())):
        raise ConfigError(f"--dataset-path {path}: there is no such file", param="--dataset-path")
    return path

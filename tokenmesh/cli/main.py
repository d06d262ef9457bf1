"""The `tokenmesh` command: its subcommands and what each of them starts."""

import importlib
import sys
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from tokenmesh import __version__
from tokenmesh.cli.arguments import arrange, join_values
from tokenmesh.cli.flags import FLAGS, UP_FLAGS, with_flags
from tokenmesh.shared.errors import ConfigError, TokenMeshError

MISUSE: Final = 2
INTERRUPTED: Final = 130


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"tokenmesh {__version__}")
        raise typer.Exit


def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """LLM serving as a mesh of small services, with an OpenAI-compatible API."""


PASSING_ON: Final = {"ignore_unknown_options": True}
"""For `run`, whose flags are those of `up`."""
WITH_SETTINGS: Final = {"up": UP_FLAGS, "serve": FLAGS, "plan": FLAGS}
"""Commands that take settings, and their flags."""
COMMANDS: Final = {
    "up": "up:up",
    "run": "run:run_model",
    "serve": "serve:serve",
    "plan": "plan:plan",
    "chat": "chat:chat",
    "trace": "trace:trace",
    "top": "top:top",
    "ps": "models:ps",
    "list": "models:list_models",
    "pull": "models:pull",
    "rm": "models:rm",
    "quantize": "quantize:quantize",
    "train-draft": "train_draft:train_draft",
    "drain": "drain:drain",
    "bench": "bench.commands:bench",
}
"""Module and function of each, or its group of commands."""


@cache
def _group(commands: tuple[str, ...]) -> Any:
    """The command of some commands: a service must not wait for the imports of the others."""
    app = typer.Typer(
        name="tokenmesh",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(options)
    for name in commands:
        module, _, attribute = COMMANDS[name].partition(":")
        function = getattr(importlib.import_module(f"tokenmesh.cli.{module}"), attribute)
        if isinstance(function, typer.Typer):
            app.add_typer(function)
            continue
        flags = WITH_SETTINGS.get(name)
        settings = PASSING_ON if name == "run" else None
        command = app.command(name, context_settings=settings)
        command(function if flags is None else with_flags(function, flags))
    return typer.main.get_command(app)


_ELSEWHERE: Final = {
    "launch": "`tokenmesh launch render MODEL` starts a frontend without workers",
    "ls": "`tokenmesh list` lists the models on this machine",
    "show": "GET /v1/models shows the models that are served",
    "stop": "Ctrl-C ends `tokenmesh up`, `tokenmesh drain ID` takes one process out",
    "complete": "POST /v1/completions completes a text, `tokenmesh chat` chats",
}
"""Commands of Ollama and vLLM, and what does that here."""


def known_flags(command: str) -> frozenset[str]:
    """Every flag that a command takes."""
    found = {"--help"}
    for parameter in _group((command,)).commands[command].params:
        found |= {*parameter.opts, *parameter.secondary_opts}
    return frozenset(each for each in found if each.startswith("-"))


def run(arguments: Sequence[str]) -> int:
    """Run a command line without the program's name; the exit code."""
    try:
        words = list(arguments)
        if words[:2] == ["launch", "render"]:
            words[:2] = ["up", "--render-only"]
        if words[:1] and (hint := _ELSEWHERE.get(words[0])):
            raise ConfigError(f"unknown command {words[0]}: {hint}", param=words[0])
        if words[:1] and words[0] in WITH_SETTINGS:
            words[1:] = arrange(words[1:], known_flags(words[0]))
        if words[:1] == ["bench"]:
            words[1:] = join_values(words[1:])
        is_known = bool(words) and words[0] in COMMANDS
        _group((words[0],) if is_known else tuple(COMMANDS))(words, prog_name="tokenmesh")
    except TokenMeshError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(
            f"tokenmesh: {error.message}", style="red", markup=False
        )
        return MISUSE
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    return 0


def main() -> None:
    """Run the command line of this process."""
    sys.exit(run(sys.argv[1:]))

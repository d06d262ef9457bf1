"""The `tokenmesh` command."""

import sys
from collections.abc import Sequence
from typing import Annotated, Final

import typer
from rich.console import Console

from tokenmesh import __version__
from tokenmesh.cli.arguments import arrange
from tokenmesh.cli.chat import chat
from tokenmesh.cli.drain import drain
from tokenmesh.cli.flags import FLAGS, UP_FLAGS, with_flags
from tokenmesh.cli.serve import serve
from tokenmesh.cli.top import top
from tokenmesh.cli.trace import trace
from tokenmesh.cli.up import up
from tokenmesh.shared.errors import ConfigError, TokenMeshError

MISUSE: Final = 2
INTERRUPTED: Final = 130

app = typer.Typer(
    name="tokenmesh",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"tokenmesh {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """LLM serving as a mesh of small services, with an OpenAI-compatible API."""


WITH_SETTINGS: Final = ("up", "serve")
app.command("up")(with_flags(up, UP_FLAGS))
app.command("serve")(with_flags(serve, FLAGS))
app.command("chat")(chat)
app.command("trace")(trace)
app.command("top")(top)
app.command("drain")(drain)


_ELSEWHERE: Final = {
    "run": "`tokenmesh up MODEL` serves a model, `tokenmesh chat` talks to it",
    "pull": "`tokenmesh up MODEL` downloads what is missing and serves it",
    "list": "GET /v1/models lists the models that are served",
    "ls": "GET /v1/models lists the models that are served",
    "show": "GET /v1/models shows the models that are served",
    "ps": "`tokenmesh top` shows what runs",
    "stop": "Ctrl-C ends `tokenmesh up`, `tokenmesh drain ID` takes one process out",
    "rm": "models are in Hugging Face's cache: `hf cache` manages it",
    "complete": "POST /v1/completions completes a text, `tokenmesh chat` chats",
}
"""Commands of Ollama and vLLM, and what does that here."""


def known_flags(command: str) -> frozenset[str]:
    """Every flag that a command takes."""
    group = typer.main.get_command(app)
    found = {"--help"}
    for parameter in group.commands[command].params:  # type: ignore[attr-defined]
        found |= {*parameter.opts, *parameter.secondary_opts}
    return frozenset(each for each in found if each.startswith("-"))


def run(arguments: Sequence[str]) -> int:
    """Run a command line without the program's name; the exit code."""
    try:
        words = list(arguments)
        if words[:1] and (hint := _ELSEWHERE.get(words[0])):
            raise ConfigError(f"unknown command {words[0]}: {hint}", param=words[0])
        if words[:1] and words[0] in WITH_SETTINGS:
            words[1:] = arrange(words[1:], known_flags(words[0]))
        app(words, prog_name="tokenmesh")
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
    """Entry point of the console script."""
    sys.exit(run(sys.argv[1:]))

"""`tokenmesh chat`: talk to a model in the terminal, or through a pipe."""

import sys
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console

from tokenmesh.cli.api import DEFAULT_URL, Api
from tokenmesh.cli.conversation import HELP, Conversation
from tokenmesh.shared.errors import TokenMeshError


def chat(
    url: Annotated[str, typer.Option(help="The gateway.")] = DEFAULT_URL,
    model: Annotated[
        str | None, typer.Option(help="Model name; default: the first one served.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="API key.")] = None,
) -> None:
    """Chat with a served model; each line of a piped input is a turn."""
    console = Console(highlight=False)
    options = {"temperature": temperature, "max_tokens": max_tokens}
    given = {name: value for name, value in options.items() if value is not None}
    with Api(url, api_key) as api:
        conversation = Conversation(api, model or api.first_model(), given)
        conversation.system = system
        is_interactive = sys.stdin.isatty()
        if is_interactive:
            console.print(f"{conversation.model} at {url}. {HELP}", style="dim", markup=False)
        for line in _lines(console, is_interactive):
            if line == "/exit":
                break
            if line and not _turn(conversation, line, console, is_interactive):
                raise typer.Exit(1)


def _turn(conversation: Conversation, line: str, console: Console, is_interactive: bool) -> bool:
    """Answer a line or obey a command; whether the chat goes on."""
    try:
        note = conversation.command(line) if line.startswith("/") else None
        if note is not None:
            console.print(note, style="dim", markup=False)
            return True
        for piece in conversation.ask(line):
            console.print(piece.reasoning, style="dim", markup=False, end="", soft_wrap=True)
            console.print(piece.text, markup=False, end="", soft_wrap=True)
        console.print()
        if is_interactive:
            console.print(f"tokenmesh trace {conversation.request_id}", style="dim")
    except KeyboardInterrupt:
        console.print("\n(stopped)", style="dim")
    except TokenMeshError as error:
        if not is_interactive:
            raise
        console.print(error.message, style="red", markup=False)
    return True


def _lines(console: Console, is_interactive: bool) -> Iterator[str]:
    """What the user says, without surrounding space, until the end of the input."""
    if not is_interactive:
        yield from (line.strip() for line in sys.stdin)
        return
    while True:
        try:
            yield console.input("[bold green]> [/]").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return

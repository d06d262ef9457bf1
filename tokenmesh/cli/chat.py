"""`tokenmesh chat`: talk to a model in the terminal, or through a pipe."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Annotated

import typer
from rich.console import Console

from tokenmesh.cli.api import DEFAULT_URL, Api, Piece
from tokenmesh.cli.conversation import HELP, Conversation
from tokenmesh.cli.word_wrap import WordWrap
from tokenmesh.shared.errors import TokenMeshError
from tokenmesh.shared.logs import printable

with suppress(ImportError):
    # Gives `input` line editing and the history of this session, where Python has it.
    import readline  # noqa: F401


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
        trace = _trace_command(url) if is_interactive else None
        if is_interactive:
            console.print(f"{conversation.model} at {url}. {HELP}", style="dim", markup=False)
        for line in _lines(console, is_interactive):
            if line == "/exit":
                break
            if line:
                _turn(conversation, line, console, trace)


def _turn(conversation: Conversation, line: str, console: Console, trace: str | None) -> None:
    """Answer a line or obey a command; `trace`: how to look at the answer's, for a person."""
    try:
        note = conversation.command(line) if line.startswith("/") else None
        if note is not None:
            console.print(note, style="dim", markup=False)
            return
        _print_answer(conversation.ask(line), console)
        if trace is not None:
            hint = trace.format(conversation.request_id)
            console.print(hint, style="dim", markup=False, soft_wrap=True)
    except KeyboardInterrupt:
        console.print("\n(stopped)", style="dim")
    except TokenMeshError as error:
        if trace is None:
            raise
        console.print(error.message, style="red", markup=False)


def _print_answer(pieces: Iterable[Piece], console: Console) -> None:
    """As it is made; on a terminal a word that does not fit goes to the next line."""
    wrap = WordWrap(console.width if console.is_terminal else None)
    style = ""
    for piece in pieces:
        for text, own_style in ((piece.reasoning, "dim"), (piece.text, "")):
            if not text:
                continue
            if own_style != style:
                _print(console, wrap.rest(), style)
                style = own_style
            # A model may write what a terminal would obey.
            _print(console, wrap.feed(printable(text)), style)
    _print(console, wrap.rest() + "\n", style)


def _print(console: Console, text: str, style: str) -> None:
    console.print(text, style=style, markup=False, end="", soft_wrap=True)


def _lines(console: Console, is_interactive: bool) -> Iterator[str]:
    """What the user says, without surrounding space, until the end of the input."""
    if not is_interactive:
        yield from (line.strip() for line in sys.stdin)
        return
    prompt = _prompt(console)
    while True:
        try:
            yield input(prompt).strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return


def _trace_command(url: str) -> str:
    return "tokenmesh trace {}" + ("" if url == DEFAULT_URL else f" --url {url}")


def _prompt(console: Console) -> str:
    """The prompt as readline wants it: what takes no room on the screen is marked."""
    if not console.is_terminal or console.no_color:
        return "> "
    return "\x01\x1b[1;32m\x02> \x01\x1b[0m\x02"

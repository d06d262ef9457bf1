"""`tokenmesh chat`: talk to a model in the terminal, or through a pipe."""

import io
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from tokenmesh.cli.api import DEFAULT_URL, ChatDelta, GatewayClient, Url
from tokenmesh.cli.conversation import COMMANDS, ChatHistory
from tokenmesh.cli.markdown import MarkdownStream
from tokenmesh.shared.errors import TokenMeshError
from tokenmesh.shared.logs import printable

_HINT: Final = "/help shows the commands, Alt-Enter begins a new line, Ctrl-D leaves."


def chat(
    url: Url = DEFAULT_URL,
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
    with GatewayClient(url, api_key) as api:
        conversation = ChatHistory(api, model or api.models()[0], given)
        conversation.system = system
        is_interactive = sys.stdin.isatty()
        trace = _trace_command(url) if is_interactive else None
        if is_interactive:
            console.print(f"{conversation.model} at {url}. {_HINT}", style="dim", markup=False)
        for line in _lines(console, is_interactive):
            if line == "/exit":
                break
            if line:
                _turn(conversation, line, console, trace)


def _turn(conversation: ChatHistory, line: str, console: Console, trace: str | None) -> None:
    """Answer a line or run a command; `trace`: the hint how to show its trace, for a terminal."""
    try:
        note = conversation.command(line) if line.startswith("/") else None
        if note is not None:
            console.print(note, style="dim", markup=False)
            return
        _print_answer(conversation.ask(line), console)
        if trace is not None:
            hint = trace.format(conversation.request_id)
            facts = f"{conversation.speed}; {hint}" if conversation.speed else hint
            console.print(facts, style="dim", markup=False, soft_wrap=True)
    except KeyboardInterrupt:
        console.print("\n(stopped)", style="dim")
    except TokenMeshError as error:
        if trace is None:
            raise
        console.print(error.message, style="red", markup=False)


def _print_answer(deltas: Iterable[ChatDelta], console: Console) -> None:
    """The answer as it is made: Markdown on a terminal, plain text elsewhere."""
    if not console.is_terminal:
        for delta in deltas:
            console.print(printable(delta.text), markup=False, end="", soft_wrap=True)
        console.print()
        return
    reasoning, answer = MarkdownStream(console, "dim"), MarkdownStream(console)
    try:
        for delta in deltas:
            # a model may write control characters of a terminal
            if delta.reasoning:
                reasoning.feed(printable(delta.reasoning))
            if delta.text:
                reasoning.end()
                answer.feed(printable(delta.text))
    finally:
        reasoning.end()
        answer.end()


def _lines(console: Console, is_interactive: bool) -> Iterator[str]:
    """The user's lines, stripped, until the end of the input."""
    if not is_interactive:
        if isinstance(sys.stdin, io.TextIOWrapper):
            # A file in another encoding is still a text; what cannot be read is U+FFFD.
            sys.stdin.reconfigure(encoding="utf-8", errors="replace")
        yield from (line.strip() for line in sys.stdin)
        return
    # a slow import, which a pipe must not wait for
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.formatted_text import ANSI
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(
        history=FileHistory(history_file()),
        completer=WordCompleter(list(COMMANDS), meta_dict=COMMANDS, sentence=True),
        complete_while_typing=False,
        key_bindings=keys,
    )
    prompt = ANSI("> " if console.no_color else "\x1b[1;32m> \x1b[0m")
    while True:
        try:
            line = session.prompt(prompt).strip()
        except KeyboardInterrupt:
            console.print("(Ctrl-D leaves)", style="dim")
            continue
        except EOFError:
            return
        yield line


def history_file() -> Path:
    """Where the user's lines are kept, readable by this user alone."""
    file = Path.home() / ".local/state/tokenmesh/chat_history"
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file.touch(mode=0o600)
    return file


def _trace_command(url: str) -> str:
    return "tokenmesh trace {}" + ("" if url == DEFAULT_URL else f" --url {url}")

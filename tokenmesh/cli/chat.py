"""`tokenmesh chat`: talk to a model in the terminal, or through a pipe."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Annotated, Final

import typer
from rich.cells import cell_len
from rich.console import Console

from tokenmesh.cli.api import DEFAULT_URL, Api, ChatDelta
from tokenmesh.shared.errors import InvalidInput, TokenMeshError
from tokenmesh.shared.logs import printable

_FENCE: Final = "```"


class WordWrap:
    """Holds back a word until it is complete; code between fences stays as it is."""

    def __init__(self, width: int | None) -> None:
        """`width` in columns; None: nothing is broken or held back."""
        self._width = width
        self._column = 0
        self._spaces = ""
        self._word = ""
        self._is_code = False
        self._line_starts = True

    def feed(self, text: str) -> str:
        """What can be written once `text` has come."""
        if self._width is None:
            return text
        return "".join(map(self._take, text))

    def rest(self) -> str:
        """What is held back."""
        return self._end_word() + self._take_spaces()

    def _take(self, char: str) -> str:
        if char == "\n":
            written = self.rest() + char
            self._column, self._line_starts = 0, True
            return written
        if char.isspace():
            written = self._end_word()
            self._spaces += char
            return written
        # Scripts with wide characters are written without spaces.
        is_wide = not char.isascii() and cell_len(char) > 1
        written = self._end_word() if is_wide else ""
        self._word += char
        if is_wide or cell_len(self._word) >= (self._width or 0):
            written += self._end_word()
        return written

    def _end_word(self) -> str:
        if not self._word:
            return ""
        if self._line_starts and self._word.startswith(_FENCE):
            self._is_code = not self._is_code
        room = (self._width or 0) - self._column - cell_len(self._spaces)
        if self._column and cell_len(self._word) > room and not self._is_code:
            self._spaces, self._column = "", 0
            written = "\n"
        else:
            written = self._take_spaces()
        written += self._word
        self._column += cell_len(self._word)
        self._word, self._line_starts = "", False
        return written

    def _take_spaces(self) -> str:
        spaces, self._spaces = self._spaces, ""
        self._column += cell_len(spaces)
        return spaces


HELP: Final = "/system TEXT sets the system prompt, /reset forgets all, /exit leaves."


class ChatHistory:
    """Messages of a chat; an answer that broke off leaves no trace in them."""

    def __init__(self, api: Api, model: str, options: Mapping[str, object]) -> None:
        self.model = model
        self.system: str | None = None
        self.request_id = ""
        """Of the last answer; names its trace."""
        self._api = api
        self._options = options
        self._turns: list[dict[str, str]] = []

    @property
    def messages(self) -> list[dict[str, str]]:
        """As they are sent."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        return [*head, *self._turns]

    def command(self, line: str) -> str:
        """Run a line that begins with a slash; its output. Raises InvalidInput."""
        name, _, rest = line.partition(" ")
        if name == "/system":
            self.system = rest.strip() or None
            return "system prompt set" if self.system else "no system prompt"
        if name == "/reset":
            self._turns.clear()
            return "forgotten"
        if name == "/help":
            return HELP
        raise InvalidInput(f"unknown command {name}. {HELP}", param=name)

    def ask(self, text: str) -> Iterator[ChatDelta]:
        """The answer as it is made; it joins the conversation when it is complete."""
        question = {"role": "user", "content": text}
        answer: list[str] = []
        for delta in self._api.chat(self.model, [*self.messages, question], self._options):
            self.request_id = delta.request_id
            answer.append(delta.text)
            yield delta
        self._turns += [question, {"role": "assistant", "content": "".join(answer)}]


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
        conversation = ChatHistory(api, model or api.first_model(), given)
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
            console.print(hint, style="dim", markup=False, soft_wrap=True)
    except KeyboardInterrupt:
        console.print("\n(stopped)", style="dim")
    except TokenMeshError as error:
        if trace is None:
            raise
        console.print(error.message, style="red", markup=False)


def _print_answer(pieces: Iterable[ChatDelta], console: Console) -> None:
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
            # A model may write control characters of a terminal.
            _print(console, wrap.feed(printable(text)), style)
    _print(console, wrap.rest() + "\n", style)


def _print(console: Console, text: str, style: str) -> None:
    console.print(text, style=style, markup=False, end="", soft_wrap=True)


def _lines(console: Console, is_interactive: bool) -> Iterator[str]:
    """The user's lines, stripped, until the end of the input."""
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

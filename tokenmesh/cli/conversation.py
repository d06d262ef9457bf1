"""Conversation: the turns so far, and the commands that change them."""

from collections.abc import Iterator, Mapping
from typing import Final

from tokenmesh.cli.api import Api, Piece
from tokenmesh.shared.errors import InvalidInput

HELP: Final = "/system TEXT sets the system prompt, /reset forgets all, /exit leaves."


class Conversation:
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
        """Obey a line that begins with a slash; what to tell the user. Raises InvalidInput."""
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

    def ask(self, text: str) -> Iterator[Piece]:
        """The answer as it is made; it joins the conversation when it is complete."""
        question = {"role": "user", "content": text}
        answer: list[str] = []
        for piece in self._api.chat(self.model, [*self.messages, question], self._options):
            self.request_id = piece.request_id
            answer.append(piece.text)
            yield piece
        self._turns += [question, {"role": "assistant", "content": "".join(answer)}]

"""ChatHistory: the messages of a chat in the terminal, and the commands that change them."""

import base64
import json
import mimetypes
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from tokenmesh.cli.api import ChatDelta, GatewayClient
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.messages.sampling import SamplingParams

COMMANDS: Final = {
    "/model": "[NAME] shows the served models, or changes the model",
    "/system": "[TEXT] sets the system prompt",
    "/set": "[FIELD [VALUE]] shows or sets a field of the requests, such as temperature",
    "/image": "PATH adds an image to the next message",
    "/save": "PATH writes the conversation to a file, as JSON",
    "/reset": "forgets the conversation",
    "/help": "shows the commands",
    "/exit": "leaves",
}
HELP: Final = "\n".join(f"{name} {text}" for name, text in COMMANDS.items())
_MAX_IMAGE_BYTES: Final = 20 << 20


class ChatHistory:
    """Messages of a chat; an answer that broke off leaves no trace in them."""

    def __init__(self, api: GatewayClient, model: str, options: Mapping[str, object]) -> None:
        self.model = model
        self.system: str | None = None
        self.request_id = ""
        """The id of the last answer, which names its trace."""
        self.speed = ""
        """Tokens of the last answer, tokens a second and the time to the first, as text."""
        self._api = api
        self._options = dict(options)
        self._images: list[dict[str, object]] = []
        """Images of the next message, as its content parts."""
        self._turns: list[dict[str, Any]] = []

    @property
    def messages(self) -> list[dict[str, Any]]:
        """As they are sent."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        return [*head, *self._turns]

    def command(self, line: str) -> str:
        """Run a line that begins with a slash; its output. Raises InvalidInput."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        match name:
            case "/system":
                self.system = rest or None
                return "system prompt set" if self.system else "no system prompt"
            case "/reset":
                self._turns.clear()
                self._images.clear()
                return "forgotten"
            case "/help":
                return HELP
            case "/model":
                return self._change_model(rest)
            case "/set":
                return self._set(rest)
            case "/image":
                return self._add_image(Path(rest).expanduser())
            case "/save":
                return self._save(Path(rest).expanduser())
        raise InvalidInput(f"unknown command {name}.\n{HELP}", param=name)

    def ask(self, text: str) -> Iterator[ChatDelta]:
        """The answer as it is made; it joins the conversation when it is complete."""
        parts = [*self._images, {"type": "text", "text": text}]
        question = {"role": "user", "content": parts if self._images else text}
        answer: list[str] = []
        began_s = monotonic_s()
        first_s: float | None = None
        num_tokens = 0
        for delta in self._api.chat(self.model, [*self.messages, question], self._options):
            self.request_id = delta.request_id
            if first_s is None and (delta.text or delta.reasoning):
                first_s = monotonic_s()
            num_tokens = delta.num_tokens or num_tokens
            answer.append(delta.text)
            yield delta
        self.speed = _speed(num_tokens, began_s, first_s, monotonic_s())
        self._turns += [question, {"role": "assistant", "content": "".join(answer)}]
        self._images.clear()

    def _change_model(self, name: str) -> str:
        served = self._api.models()
        if not name:
            return "\n".join(f"{'*' if each == self.model else ' '} {each}" for each in served)
        if name not in served:
            raise InvalidInput(f"{name} is not served: {', '.join(served)}", param="/model")
        self.model = name
        return f"the next answers are from {name}"

    def _set(self, words: str) -> str:
        field, _, value = words.partition(" ")
        if field and value:
            self._options[field] = _checked(field, _value_of(value.strip()))
        elif field:
            self._options.pop(field, None)
        shown = (f"{name} = {json.dumps(each)}" for name, each in self._options.items())
        return "\n".join(shown) or "no field is set: the model's own values apply"

    def _add_image(self, path: Path) -> str:
        kind = mimetypes.guess_type(path.name)[0] or ""
        if not kind.startswith("image/"):
            raise InvalidInput(f"{path} has no name of an image (.png, .jpg, ...)", param="/image")
        try:
            if path.stat().st_size > _MAX_IMAGE_BYTES:
                raise InvalidInput(
                    f"{path} is larger than {_MAX_IMAGE_BYTES >> 20} MiB", param="/image"
                )
            data = base64.b64encode(path.read_bytes()).decode()
        except OSError as error:
            raise InvalidInput(f"{path}: {error.strerror}", param="/image") from error
        url = f"data:{kind};base64,{data}"
        self._images.append({"type": "image_url", "image_url": {"url": url}})
        return f"{path.name} goes with the next message"

    def _save(self, path: Path) -> str:
        saved = {"model": self.model, **self._options, "messages": self.messages}
        try:
            with path.open("x", encoding="utf-8") as file:
                json.dump(saved, file, indent=2, ensure_ascii=False)
        except OSError as error:
            raise InvalidInput(f"{path}: {error.strerror}", param="/save") from error
        return f"wrote {len(self.messages)} messages to {path}"


def _value_of(text: str) -> object:
    """JSON where it is that, else the text itself."""
    try:
        value: object = json.loads(text)
    except ValueError:
        return text
    return value


_TYPES: Final = {
    **{each.name: each.type for each in msgspec.structs.fields(SamplingParams)},
    "n": int,
    "max_completion_tokens": int,
    "logprobs": bool,
    "top_logprobs": int,
}
"""Types of fields of a chat. Others are left to the gateway, which knows them all."""


def _checked(field: str, value: object) -> object:
    """The value. Raises InvalidInput where it is not of the field's type."""
    try:
        msgspec.convert(value, _TYPES.get(field, Any))
    except msgspec.ValidationError as error:
        # Such as: Expected `float`, got `str`
        what = str(error).lower().replace("`", "")
        raise InvalidInput(f"{field} cannot be {value!r}: {what}", param=field) from error
    return value


def _speed(num_tokens: int, began_s: float, first_s: float | None, ended_s: float) -> str:
    if first_s is None or num_tokens < 1:
        return ""
    rate = (num_tokens - 1) / max(ended_s - first_s, 1e-9)
    shown = f", {rate:.1f} tokens/s" if num_tokens > 1 else ""
    return f"{num_tokens} tokens{shown}, the first after {first_s - began_s:.2f} s"

"""Places: where in the client's body each message and part of the translated request came from.

Other services judge the translated request; what they find wrong is told in the client's words.
"""

import re
from collections.abc import Mapping
from typing import Final

from tokenmesh.shared.errors import InvalidInput, TokenMeshError

_MESSAGE: Final = re.compile(r"messages\[(\d+)\](?:\.content\[(\d+)\])?")


class Places:
    """Filled while a body is translated."""

    def __init__(self, names: Mapping[str, str]) -> None:
        """`names`: fields of a chat request that go by another name in the client's body."""
        self._names = names
        self._messages: list[tuple[str, list[str]]] = []

    def add(self, place: str, parts: list[str]) -> None:
        """The next message, and its parts where its content is a list."""
        self._messages.append((place, parts))

    def rename(self, error: TokenMeshError) -> TokenMeshError:
        """The same error in the client's terms; only the client's own errors speak of fields."""
        if not isinstance(error, InvalidInput):
            return error
        message = _MESSAGE.sub(self._place, error.message)
        param = None if error.param is None else _MESSAGE.sub(self._place, error.param)
        if param is not None and param in self._names:
            message = re.sub(rf"\b{param}\b", self._names[param], message)
            param = self._names[param]
        return type(error)(message, param=param, retry_after_s=error.retry_after_s)

    def _place(self, match: re.Match[str]) -> str:
        index, part = int(match[1]), match[2]
        if index >= len(self._messages):
            return match[0]
        place, parts = self._messages[index]
        if part is None:
            return place
        return parts[int(part)] if int(part) < len(parts) else place

"""Places: which field of the client's body each field of the translated chat came from.

Other services judge the translated request; what they find wrong is told in the client's words.
"""

import copy
import re
from collections.abc import Mapping
from typing import Final

from tokenmesh.shared.errors import InvalidInput, TokenMeshError

_PATH: Final = re.compile(r"\b(?:messages|tools)\[\d+\](?:\.[a-z_]+|\[\d+\])*")


class Places:
    """Translates errors back."""

    def __init__(self, names: Mapping[str, str], sources: Mapping[str, str] | None = None) -> None:
        """Both map a chat's fields to the client's.

        `names`: fields such as `max_tokens`, also where they stand as words in a message;
        `sources`: paths such as `messages[3]` and `tools[0].function`.
        """
        self._names = names
        self._sources = dict(sources or {})
        self._num_messages = 0

    def add(self, place: str, parts: list[str]) -> None:
        """Where the next message came from, and its parts where its content is a list."""
        message = f"messages[{self._num_messages}]"
        self._num_messages += 1
        self._sources[message] = place
        for index, part in enumerate(parts):
            self._sources[f"{message}.content[{index}]"] = part

    def add_tools(self, count: int, parameters: str = "parameters") -> None:
        """Functions that the client writes without an object `function` around their fields."""
        for index in range(count):
            function, own = f"tools[{index}].function", f"tools[{index}]"
            self._sources[function] = own
            self._sources[f"{function}.parameters"] = f"{own}.{parameters}"

    def rename(self, error: TokenMeshError) -> TokenMeshError:
        """The same error in the client's terms; only the client's own errors speak of fields."""
        if not isinstance(error, InvalidInput):
            return error
        renamed = copy.copy(error)
        told = _PATH.sub(lambda match: self._of(match[0]), error.message)
        if error.param is not None:
            renamed.param = self._of(error.param)
            if error.param in self._names:
                told = re.sub(rf"\b{re.escape(error.param)}\b", renamed.param, told)
            found = _PATH.search(error.message)
            if found and error.param in ("messages", "tools"):
                renamed.param = self._of(found[0])
        renamed.message = told
        renamed.args = (told,)
        return renamed

    def _of(self, path: str) -> str:
        """The client's path; the longest known beginning is replaced."""
        head = path
        while head:
            known = self._sources.get(head) or self._names.get(head)
            if known is not None:
                return known + path[len(head) :]
            head = head[: max(head.rfind("."), head.rfind("["), 0)]
        return path

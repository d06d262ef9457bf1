"""Places: where in the client's body each message and part of the translated request came from.

Other services judge the translated request; what they find wrong is told in the client's words.
"""

import re
from typing import Final

from tokenmesh.shared.errors import InvalidInput, TokenMeshError

_MESSAGE: Final = re.compile(r"messages\[(\d+)\](?:\.content\[(\d+)\])?")
_NAMES: Final = {
    "max_completion_tokens": "max_tokens",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "structured_outputs": "output_config.format",
    "thinking_token_budget": "thinking.budget_tokens",
    "user": "metadata.user_id",
}
"""Fields of a chat request that go by another name here."""


class Places:
    """Filled while a body is translated."""

    def __init__(self) -> None:
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
        if param in _NAMES:
            message = re.sub(rf"\b{param}\b", _NAMES[param], message)
            param = _NAMES[param]
        return type(error)(message, param=param, retry_after_s=error.retry_after_s)

    def _place(self, match: re.Match[str]) -> str:
        index, part = int(match[1]), match[2]
        if index >= len(self._messages):
            return match[0]
        place, parts = self._messages[index]
        if part is None:
            return place
        return parts[int(part)] if int(part) < len(parts) else place

"""Paths: which field of the client's body a field of the translated chat came from."""

import copy
import re
from collections.abc import Mapping
from typing import Final

from tokenmesh.shared.errors import TokenMeshError

_PATH: Final = re.compile(r"\b(?:messages|tools)\[\d+\](?:\.[a-z_]+|\[\d+\])*")
_NAMES: Final = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
    "logprobs": "top_logprobs",
    "truncate_prompt_tokens": "truncation",
}


class Paths:
    """Translates errors back."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        """`sources`: `messages[3]` and `tools[0].function` to the client's paths."""
        self._sources = _NAMES | dict(sources)

    def rename(self, error: TokenMeshError) -> TokenMeshError:
        """The same error with the client's names in it."""
        renamed = copy.copy(error)
        told = _PATH.sub(lambda match: self._of(match[0]), error.message)
        if error.param is not None:
            renamed.param = self._of(error.param)
            if error.param in _NAMES:
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
            if head in self._sources:
                return self._sources[head] + path[len(head) :]
            head = head[: max(head.rfind("."), head.rfind("["), 0)]
        return path

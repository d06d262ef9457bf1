"""ContentLogprobs: selects the log-probabilities of the answer's text.

Tokens of reasoning, tool calls and markers have some too, but no item shows them.
"""

from typing import Final

from tokenmesh.services.gateway.apis.openai.response_parts import LogprobShapes
from tokenmesh.services.gateway.apis.openai.shapes import ChatLogprob
from tokenmesh.services.gateway.core.generation.chunk import OutputChunk

_MAX_UNDECIDED: Final = 64


class ContentLogprobs:
    """Log-probabilities of the text of one model turn."""

    def __init__(self, shapes: LogprobShapes) -> None:
        self._shapes = shapes
        self._undecided: list[ChatLogprob] = []
        """Tokens whose text the parser has not classified yet."""

    def push(self, chunk: OutputChunk) -> list[list[ChatLogprob]]:
        """One list for each content event of the chunk."""
        entries = self._shapes.chat(chunk.logprobs).content
        last = entries[-1] if entries and chunk.finish_reason is not None else None
        is_end = last is not None and not chunk.text.endswith(last.token)
        if chunk.events is None:
            return [entries[:-1] if is_end else entries]
        stretches: list[list[ChatLogprob]] = [[]]
        for entry, num_bytes in zip(entries, chunk.content_bytes, strict=True):
            if entry is not last or not is_end:
                self._undecided.append(entry)
            if num_bytes is None:
                del self._undecided[:-_MAX_UNDECIDED]
                continue
            if num_bytes:
                stretches[-1] += _last_of(self._undecided, num_bytes)
            elif stretches[-1]:
                stretches.append([])
            self._undecided.clear()
        return stretches


def _last_of(entries: list[ChatLogprob], num_bytes: int) -> list[ChatLogprob]:
    """The last entries that together have at least `num_bytes` bytes of text."""
    first, missing = len(entries), num_bytes
    while first and missing > 0:
        first -= 1
        missing -= len(entries[first].bytes)
    return entries[first:]

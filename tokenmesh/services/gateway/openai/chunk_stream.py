"""ChunkStream: what the streams of chats and completions have in common."""

from typing import Final

from tokenmesh.services.gateway.generation.request import ChunkOptions, Head
from tokenmesh.services.gateway.generation.usage import Usage, usage_of
from tokenmesh.services.gateway.http.sse import encode_json

CHAT_CHUNK: Final = b"chat.completion.chunk"
COMPLETION_CHUNK: Final = b"text_completion"
NULL: Final = b"null"


class ChunkStream:
    """Encodes what does not vary once: a chunk is a few byte strings joined."""

    def __init__(self, kind: bytes, head: Head, options: ChunkOptions) -> None:
        """`kind`: the chunks' field `object`."""
        self._options = options
        tier = b""
        if head.service_tier is not None:
            tier = b',"service_tier":' + encode_json(head.service_tier)
        self._start = b'data: {"id":%b,"object":"%b","created":%d,"model":%b%b,"choices":[' % (
            encode_json(head.id),
            kind,
            head.created,
            encode_json(head.model),
            tier,
        )

    def end(self, usage: Usage) -> bytes:
        """The chunk after the last choice has ended; empty unless the client requested usage."""
        if not self._options.usage:
            return b""
        return b'%b],"usage":%b}\n\n' % (self._start, encode_json(usage))

    def _running_usage(self, prompt_tokens: int, completion_tokens: int) -> bytes:
        """The field `usage` of a chunk, where every chunk has one."""
        if not self._options.running_usage:
            return b""
        return b',"usage":' + encode_json(usage_of(prompt_tokens, completion_tokens, None))

"""BatchWriter: the answer of /v1/chat/completions/batch, the choices of all conversations."""

from collections.abc import Sequence

from tokenmesh.services.gateway.extras.batch_chat import joined
from tokenmesh.services.gateway.generation.chunk import OutputChunk
from tokenmesh.services.gateway.generation.request import GenerationRequest
from tokenmesh.services.gateway.openai.chat_writer import ChatWriter
from tokenmesh.services.gateway.openai.shapes import ChatChoice


class BatchWriter(ChatWriter):
    """Each choice is written as its own conversation asks: they differ in role and echo."""

    def __init__(self, asks: Sequence[GenerationRequest]) -> None:
        """`asks`: one a conversation, with the same number of choices each."""
        super().__init__(joined(asks))
        self._n = asks[0].num_choices
        self._writers = [ChatWriter(ask) for ask in asks]

    def choice(self, piece: OutputChunk) -> ChatChoice:
        """See `ChatWriter.choice`."""
        return self._writers[piece.choice // self._n].choice(piece)

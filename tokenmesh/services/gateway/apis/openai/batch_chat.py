"""BatchChatRequest: several conversations in one request, each with choices of its own.

They become one generation with a job for each; BatchWriter writes its choices.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from tokenmesh.services.gateway.apis.openai.chat_builder import build_chat, rebuild_chat
from tokenmesh.services.gateway.apis.openai.chat_writer import ChatWriter
from tokenmesh.services.gateway.apis.openai.request import ChatMessage, ChatRequest
from tokenmesh.services.gateway.apis.openai.request_builder import RequestBuilder
from tokenmesh.services.gateway.apis.openai.shapes import ChatChoice
from tokenmesh.services.gateway.core.context import RequestContext
from tokenmesh.services.gateway.core.generation.chunk import OutputChunk
from tokenmesh.services.gateway.core.generation.request import GenerationRequest
from tokenmesh.services.gateway.core.http.errors import NotSupported, invalid
from tokenmesh.services.gateway.core.http.event_loop import Turns
from tokenmesh.services.gateway.core.http.fields import Off, Positive
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.ids import RequestId

_Conversation = Annotated[list[ChatMessage], Field(min_length=1)]


class BatchChatRequest(ChatRequest):
    """A chat with several conversations; the other fields hold for each of them."""

    messages: list[_Conversation] = Field(min_length=1)  # type: ignore[assignment]
    """The conversations."""
    best_of: Positive | None = None
    early_stopping: Off = False
    guided_decoding_backend: Literal["auto"] | None = None

    _OWN: ClassVar[set[str]] = {
        "messages",
        "best_of",
        "early_stopping",
        "guided_decoding_backend",
    }

    def conversations(self) -> list[ChatRequest]:
        """One request for each, from values that are validated. Raises NotSupported."""
        self._refuse()
        names = self.model_fields_set - self._OWN
        shared: dict[str, Any] = {name: getattr(self, name) for name in names}
        first = ChatRequest.model_construct(**shared, messages=self.messages[0])
        return [first.model_copy(update={"messages": messages}) for messages in self.messages]

    def _refuse(self) -> None:
        """Raise NotSupported for what several conversations cannot have."""
        given = {
            "stream": self.stream,
            "tools": self.tools,
            "use_beam_search": self.use_beam_search,
            "early_stopping": self.early_stopping,
            "best_of": self.best_of not in (None, self.n or 1),
            "prompt_logprobs": self.prompt_logprobs is not None,
            "return_prompt_text": self.return_prompt_text,
        }
        for name, is_given in given.items():
            if is_given:
                raise invalid(name, "cannot be combined with a batch of chats", NotSupported)


class BatchWriter(ChatWriter):
    """Writes each choice for its own conversation, since they differ in role and echo."""

    def __init__(self, requests: Sequence[GenerationRequest]) -> None:
        """`requests`: one a conversation, with the same number of choices each."""
        super().__init__(joined(requests))
        self._n = requests[0].num_choices
        self._writers = [ChatWriter(each) for each in requests]

    def choice(self, merged: OutputChunk) -> ChatChoice:
        return self._writers[merged.choice // self._n].choice(merged)


async def build_batch(
    builder: RequestBuilder, body: BatchChatRequest, context: RequestContext
) -> list[GenerationRequest]:
    """Choice i of a conversation has the index `conversation * n + i`. Raises InvalidInput."""
    num_conversations, n = len(body.messages), body.n or 1
    limit = builder.settings.max_choices
    if num_conversations * n > limit:
        raise InvalidInput(
            f"{num_conversations} conversations times n = {n} are over the limit of "
            f"{limit} choices (gateway.max_choices)",
            param="messages",
        )
    requests: list[GenerationRequest] = []
    turns = Turns()
    for index, conversation in enumerate(body.conversations()):
        await turns.rest()
        path = ("messages", index)
        try:
            # The first one reads and checks the fields that all have in common.
            request = (
                await rebuild_chat(builder, requests[0], conversation, context)
                if requests
                else await build_chat(builder, conversation, context)
            )
        except InvalidInput as error:
            raise error.within(path) from error
        job = replace(
            request.jobs[0],
            request_id=RequestId(f"{context.request_id}-{index}"),
            first_choice=index * n,
            path=path,
        )
        requests.append(replace(request, jobs=(job,)))
    return requests


def joined(requests: Sequence[GenerationRequest]) -> GenerationRequest:
    """One request with the jobs of all."""
    return replace(requests[0], jobs=tuple(job for each in requests for job in each.jobs))

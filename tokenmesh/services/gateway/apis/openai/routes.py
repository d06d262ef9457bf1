"""OpenAI's routes of chats, also several in one request, of completions, and of models."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Final, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from tokenmesh.services.gateway.apis.openai.chat_builder import build_chat, rebuild_chat
from tokenmesh.services.gateway.apis.openai.chat_writer import ChatWriter
from tokenmesh.services.gateway.apis.openai.completion_builder import build_completion
from tokenmesh.services.gateway.apis.openai.completion_writer import CompletionWriter
from tokenmesh.services.gateway.apis.openai.request import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
)
from tokenmesh.services.gateway.apis.openai.request_builder import RequestBuilder
from tokenmesh.services.gateway.apis.openai.shapes import (
    ChatChoice,
    Model,
    ModelList,
    ModelPermission,
)
from tokenmesh.services.gateway.core.context import RequestContext, access_of, context_of
from tokenmesh.services.gateway.core.generation.chunk import OutputChunk
from tokenmesh.services.gateway.core.generation.request import GenerationRequest
from tokenmesh.services.gateway.core.http.body import read_json
from tokenmesh.services.gateway.core.http.endpoint import Endpoint
from tokenmesh.services.gateway.core.http.errors import NotSupported, invalid
from tokenmesh.services.gateway.core.http.event_loop import Turns
from tokenmesh.services.gateway.core.http.fields import Off, Positive
from tokenmesh.services.gateway.core.http.sse import json_response
from tokenmesh.services.gateway.gateway import Gateway
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.ids import RequestId
from tokenmesh.shared.messages.adapters import AdapterCard
from tokenmesh.shared.messages.beat import ModelCard
from tokenmesh.shared.telemetry import span

CHAT: Final = "/v1/chat/completions"
BATCH_CHAT: Final = "/v1/chat/completions/batch"
COMPLETIONS: Final = "/v1/completions"


def chat_endpoint(gateway: Gateway) -> Endpoint:
    async def create_chat_completion(request: Request) -> Response:
        """Answer a conversation, whole or as a stream of chunks."""
        context = context_of(request.scope)
        with span("validate"):
            body = await read_json(request, ChatRequest, gateway.settings)
            generation = await build_chat(gateway.builder, body, context)
        return gateway.respond(generation, ChatWriter(generation))

    return create_chat_completion


def completion_endpoint(gateway: Gateway) -> Endpoint:
    async def create_completion(request: Request) -> Response:
        """Continue one prompt or several, whole or as a stream of chunks."""
        context = context_of(request.scope)
        with span("validate"):
            body = await read_json(request, CompletionRequest, gateway.settings)
            generation = await build_completion(gateway.builder, body, context)
        writer = CompletionWriter(generation)
        return gateway.respond(generation, writer)

    return create_completion


def models_router(gateway: Gateway) -> APIRouter:
    """The routes of models."""
    router = APIRouter(tags=["models"])
    catalog = gateway.core.mesh.rendered

    @router.get("/v1/models")
    async def list_models(request: Request) -> Response:
        """Every model that a live worker serves, once for each of its names, and its adapters.

        With the scale-out routes also those that a tokenizer alone knows.
        """
        cards = catalog.all()
        names = ((card, name) for card in cards for name in catalog.names(card))
        models = [_model(card, name) for card, name in names]
        models += [_model(card, name) for name, card in catalog.splits()]
        # Where an adapter's files are is for operators, not for tenants with keys.
        shows = access_of(request).is_admin
        models += [_adapter(card, a, shows=shows) for card in cards for a in catalog.adapters(card)]
        return json_response(ModelList(data=models))

    # A model's name may contain slashes.
    @router.get("/v1/models/{model_id:path}")
    async def get_model(request: Request, model_id: str) -> Response:
        """One model by any of its names."""
        if not model_id:
            return await list_models(request)
        card = await catalog.find_soon(model_id)
        if card.adapter is not None:
            return json_response(_adapter(card, card.adapter, shows=access_of(request).is_admin))
        return json_response(_model(card, model_id))

    return router


def _adapter(card: ModelCard, adapter: AdapterCard, *, shows: bool) -> Model:
    root = (shows and adapter.source) or adapter.name
    return _model(card, adapter.name, adapter.created_s, parent=card.name, root=root)


def _model(
    card: ModelCard,
    name: str,
    created_s: float | None = None,
    parent: str | None = None,
    root: str | None = None,
) -> Model:
    created = int(card.created_s if created_s is None else created_s)
    return Model(
        id=name,
        created=created,
        root=root or card.name,
        parent=parent,
        max_model_len=card.max_model_len,
        permission=[ModelPermission(id=f"modelperm-{name}", created=created)],
        tasks=[*(["generate"] if card.generates else []), *card.tasks],
    )


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


def chat_batch_endpoint(gateway: Gateway) -> Endpoint:
    async def create_chat_completion_batch(request: Request) -> Response:
        """Answer several conversations in one body."""
        context = context_of(request.scope)
        with span("validate"):
            body = await read_json(request, BatchChatRequest, gateway.settings)
            requests = await build_batch(gateway.builder, body, context)
        writer = BatchWriter(requests)
        return gateway.respond(joined(requests), writer)

    return create_chat_completion_batch


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

"""Intake: all kinds of request."""

from tokenmesh.services.gateway.context import RequestContext
from tokenmesh.services.gateway.extras.batch_chat import batch_asks
from tokenmesh.services.gateway.extras.batch_chat_request import BatchChatRequest
from tokenmesh.services.gateway.generation.request import GenerationRequest
from tokenmesh.services.gateway.openai.chat_intake import ChatIntake
from tokenmesh.services.gateway.openai.chat_request import ChatRequest
from tokenmesh.services.gateway.openai.completion_intake import CompletionIntake
from tokenmesh.services.gateway.openai.completion_request import CompletionRequest
from tokenmesh.services.gateway.openai.request_builder import RequestBuilder
from tokenmesh.services.gateway.tenancy.tenant import Access
from tokenmesh.shared.messages.tokenize import ChatPrompt


class Intake:
    """Of one gateway."""

    def __init__(self, desk: RequestBuilder) -> None:
        self._settings = desk.settings
        self._chats = ChatIntake(desk)
        self._completions = CompletionIntake(desk)

    async def chat(self, body: ChatRequest, exchange: RequestContext) -> GenerationRequest:
        """Raises InvalidInput and its kin."""
        return await self._chats.ask(body, exchange)

    async def chat_batch(
        self, body: BatchChatRequest, exchange: RequestContext
    ) -> list[GenerationRequest]:
        """One for each conversation. Raises InvalidInput and its kin."""
        return await batch_asks(self._chats, body, exchange, self._settings)

    async def chat_prompt(self, body: ChatRequest, access: Access) -> ChatPrompt:
        """The conversation as the tokenizer takes it, large media moved out of it."""
        return await self._chats.prompt(body, access)

    async def completion(
        self, body: CompletionRequest, exchange: RequestContext
    ) -> GenerationRequest:
        """Raises InvalidInput and its kin."""
        return await self._completions.ask(body, exchange)

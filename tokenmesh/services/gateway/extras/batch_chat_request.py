"""BatchChatRequest: the body of /v1/chat/completions/batch."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from tokenmesh.services.gateway.openai.chat_request import ChatMessage, ChatRequest
from tokenmesh.services.gateway.openai.errors import NotSupported
from tokenmesh.services.gateway.openai.lenient import Off, Positive

_Conversation = Annotated[list[ChatMessage], Field(min_length=1)]


class BatchChatRequest(ChatRequest):
    """A chat with several conversations; what is said besides holds for each of them."""

    messages: list[_Conversation] = Field(min_length=1)  # type: ignore[assignment]
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
        """A request for each, of values that are validated. Raises NotSupported."""
        self._refuse()
        names = self.model_fields_set - self._OWN
        shared: dict[str, Any] = {name: getattr(self, name) for name in names}
        first = ChatRequest.model_construct(**shared, messages=self.messages[0])
        return [first.model_copy(update={"messages": messages}) for messages in self.messages]

    def _refuse(self) -> None:
        """What makes no sense for several conversations at once."""
        wanted = {
            "stream": self.stream,
            "tools": self.tools,
            "use_beam_search": self.use_beam_search,
            "early_stopping": self.early_stopping,
            "best_of": self.best_of not in (None, self.n or 1),
            "prompt_logprobs": self.prompt_logprobs is not None,
            "return_prompt_text": self.return_prompt_text,
        }
        for name, is_wanted in wanted.items():
            if is_wanted:
                raise NotSupported(f"{name} does not go with a batch of chats", param=name)

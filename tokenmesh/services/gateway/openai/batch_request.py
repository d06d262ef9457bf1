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
        """A request for each. Raises NotSupported.

        Fields that nobody knows stay in the first only: one warning is enough.
        """
        self._refuse()
        given: dict[str, Any] = self.model_dump(
            by_alias=True, exclude_unset=True, exclude=self._OWN
        )
        known = {name: value for name, value in given.items() if name in ChatRequest.model_fields}
        return [
            ChatRequest.model_validate({**(known if index else given), "messages": messages})
            for index, messages in enumerate(self.messages)
        ]

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

"""TokenizerActor: answers Tokenize, Detokenize and Describe for every model of the process."""

from collections.abc import Callable, Coroutine, Mapping
from typing import Final

import msgspec

from tokenmesh.services.tokenizer_svc.held_prompt import with_prompt
from tokenmesh.services.tokenizer_svc.loading import DEFAULT_TEMPLATE
from tokenmesh.services.tokenizer_svc.prompt import PromptTokenizer
from tokenmesh.shared.actor import Actor, Context, handles
from tokenmesh.shared.bus.base import Bus
from tokenmesh.shared.errors import InvalidInput, Unavailable, UnknownModel
from tokenmesh.shared.ids import ModelName
from tokenmesh.shared.messages.tokenize import (
    Describe,
    Described,
    Detokenize,
    Detokenized,
    ReadTokenizer,
    ReadTokenizerConfig,
    Tokenize,
    Tokenized,
    TokenizerConfigRead,
    TokenizerRead,
)
from tokenmesh.shared.tokens import unpack_ids

_PART_BYTES: Final = 1 << 20
"""Well below what a message may hold."""


class TokenizerActor(Actor):
    """Holds nothing of a request between messages: any process can answer any of them."""

    def __init__(
        self,
        models: Mapping[ModelName, PromptTokenizer],
        release: Callable[[], Coroutine[object, object, None]],
        bus: Bus,
    ) -> None:
        self._models = models
        self._release = release
        self._bus = bus

    async def stop(self) -> None:
        """Release what the models share."""
        await self._release()

    @handles(Tokenize)
    async def tokenize(self, message: Tokenize, context: Context) -> Tokenized:
        """A prompt's ids, media and route hashes."""
        model = self._model(message.model)
        return await model.tokenize(await with_prompt(self._bus, message, context.deadline_s))

    @handles(Detokenize)
    async def detokenize(self, message: Detokenize, context: Context) -> Detokenized:
        """The text of ids."""
        model = self._model(message.model)
        try:
            ids = unpack_ids(message.token_ids)
        except ValueError as error:
            raise InvalidInput("token_ids is no list of 32-bit ids", param="tokens") from error
        return Detokenized(text=await model.detokenize(ids, message.tenant))

    @handles(Describe)
    async def describe(self, message: Describe, context: Context) -> Described:
        """What a gateway needs to know, but for the tokenizer's text."""
        tokenizer = self._model(message.model)
        model = tokenizer.model
        return Described(
            fingerprint=model.fingerprint,
            vocab_size=model.vocab_size,
            special_ids=model.special_ids,
            has_chat_template=bool(model.templates),
            default_sampling_json=msgspec.json.encode(model.default_sampling),
            reasoning_parser=tokenizer.parsers.reasoning,
            tool_call_parser=tokenizer.parsers.tools,
        )

    @handles(ReadTokenizer)
    async def read(self, message: ReadTokenizer, context: Context) -> TokenizerRead:
        """A part of the tokenizer's text: over the bus, so that Redis may be away."""
        model = self._model(message.model).model
        if message.fingerprint != model.fingerprint:
            raise Unavailable(f"the tokenizer of {message.model!r} has another text by now")
        text, start = model.tokenizer_json, max(0, message.offset)
        return TokenizerRead(data=text[start : start + _PART_BYTES], num_bytes=len(text))

    @handles(ReadTokenizerConfig)
    async def read_config(
        self, message: ReadTokenizerConfig, context: Context
    ) -> TokenizerConfigRead:
        """The tokenizer's configuration as the checkpoint has it, and the template in force."""
        model = self._model(message.model).model
        template = model.templates.get(DEFAULT_TEMPLATE)
        config = {**model.tokenizer_config, "chat_template": template}
        return TokenizerConfigRead(config_json=msgspec.json.encode(config))

    def _model(self, name: ModelName) -> PromptTokenizer:
        found = self._models.get(name)
        if found is None:
            raise UnknownModel(f"this tokenizer does not serve the model {name!r}", param="model")
        return found

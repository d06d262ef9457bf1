"""TokenizerActor: answers the messages to tokenizers for every model of the process."""

import asyncio
import zlib
from collections.abc import Callable, Coroutine, Mapping
from typing import Final

import msgspec

from tokenmesh.services.tokenizer_svc.loading import DEFAULT_TEMPLATE, PART_BYTES
from tokenmesh.services.tokenizer_svc.media.audio import AudioPreparer
from tokenmesh.services.tokenizer_svc.prompt import PromptTokenizer
from tokenmesh.shared.actor import Actor, Context, handles
from tokenmesh.shared.bus.base import Bus
from tokenmesh.shared.errors import (
    InvalidInput,
    PayloadTooLarge,
    ProtocolError,
    Unavailable,
    UnknownModel,
)
from tokenmesh.shared.ids import ModelName
from tokenmesh.shared.messages import (
    AudioPrepared,
    PrepareAudio,
    PrepareSpeech,
    PromptRead,
    ReadPrompt,
    SpeechPrepared,
)
from tokenmesh.shared.messages.tokenize import (
    ChatPrompt,
    Describe,
    Described,
    Detokenize,
    Detokenized,
    HeldPrompt,
    IdsPrompt,
    ReadTokenizer,
    ReadTokenizerConfig,
    TextPrompt,
    TextsTokenized,
    Tokenize,
    Tokenized,
    TokenizerConfigRead,
    TokenizerRead,
    TokenizeTexts,
)
from tokenmesh.shared.subjects import gateway_prompts
from tokenmesh.shared.tokens import pack_ids


class TokenizerActor(Actor):
    """Keeps no state between messages: any process can answer any of them."""

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
        """Release the resources that the models share."""
        await self._release()

    @handles(Tokenize)
    async def tokenize(self, message: Tokenize, context: Context) -> Tokenized:
        """Answer with a prompt's ids, media and route hashes."""
        model = self._model(message.model)
        return await model.tokenize(await with_prompt(self._bus, message, context.deadline_s))

    @handles(TokenizeTexts)
    async def tokenize_texts(self, message: TokenizeTexts, context: Context) -> TextsTokenized:
        """Answer with the ids of many texts or pairs."""
        return await self._model(message.model).tokenize_texts(message, context.deadline_s)

    @handles(Detokenize)
    async def detokenize(self, message: Detokenize, context: Context) -> Detokenized:
        model = self._model(message.model)
        return Detokenized(text=await model.detokenize(message.token_ids, message.tenant))

    @handles(Describe)
    async def describe(self, message: Describe, context: Context) -> Described:
        """Answer with a model's properties, without the tokenizer's text."""
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
            prompts=model.prompts,
            speech=tokenizer.speech,
            reasoning_end=tokenizer.parsers.reasoning_end,
            detects_parsers=tokenizer.parsers.are_detected,
            padding_id=model.padding_id,
        )

    @handles(PrepareAudio)
    async def prepare_audio(self, message: PrepareAudio, context: Context) -> AudioPrepared:
        """Answer with clips of a recording, whose features are stored."""
        audio = self._audio(message.model)
        prompt_ids = b""
        if message.ask is not None:
            prompt_ids = pack_ids(await self._model(message.model).ask(message, message.ask))
        prepared = await audio.prepare(message)
        return msgspec.structs.replace(prepared, prompt_ids=prompt_ids)

    @handles(PrepareSpeech)
    async def prepare_speech(self, message: PrepareSpeech, context: Context) -> SpeechPrepared:
        """Answer with the next part of speech, whose features are stored."""
        return await self._audio(message.model).prepare_speech(message)

    @handles(ReadTokenizer)
    async def read(self, message: ReadTokenizer, context: Context) -> TokenizerRead:
        """Answer with a part of the tokenizer's text; over the bus, to work without Redis."""
        model = self._model(message.model).model
        if message.fingerprint != model.fingerprint:
            raise Unavailable(f"the tokenizer of {message.model!r} has changed since")
        start = max(0, message.offset)
        if message.lean:
            part = model.lean_json[start : start + PART_BYTES]
            return TokenizerRead(data=part, num_bytes=len(model.lean_json))
        index, offset = divmod(start, PART_BYTES)
        whole = b""
        if index < len(model.whole_json):
            # Lets other threads run.
            whole = await asyncio.to_thread(zlib.decompress, model.whole_json[index])
        return TokenizerRead(data=whole[offset:], num_bytes=model.num_json_bytes)

    @handles(ReadTokenizerConfig)
    async def read_config(
        self, message: ReadTokenizerConfig, context: Context
    ) -> TokenizerConfigRead:
        """Answer with the checkpoint's tokenizer_config.json and the template in use."""
        model = self._model(message.model).model
        template = model.templates.get(DEFAULT_TEMPLATE)
        config = {**model.tokenizer_config, "chat_template": template}
        return TokenizerConfigRead(config_json=msgspec.json.encode(config))

    def _audio(self, name: ModelName) -> AudioPreparer:
        audio = self._model(name).audio
        if audio is None:
            raise InvalidInput(f"the model {name} does not transcribe recordings", param="model")
        return audio

    def _model(self, name: ModelName) -> PromptTokenizer:
        found = self._models.get(name)
        if found is None:
            raise UnknownModel(f"this tokenizer does not serve the model {name!r}", param="model")
        return found


_Prompt = TextPrompt | IdsPrompt | ChatPrompt

_decoder: Final[msgspec.msgpack.Decoder[_Prompt]] = msgspec.msgpack.Decoder(_Prompt)


async def with_prompt(bus: Bus, message: Tokenize, deadline_s: float) -> Tokenize:
    """The message with its prompt, which is read from the gateway in parts if it is held there.

    Raises PayloadTooLarge, ProtocolError and the errors of the bus.
    """
    held = message.prompt
    if not isinstance(held, HeldPrompt):
        return message
    limit = bus.max_message_bytes
    if held.num_bytes > limit:
        raise PayloadTooLarge(
            f"the prompt is larger than the {limit} bytes of a message (bus.max_message_bytes)"
        )
    data = await _read(bus, held, deadline_s)
    try:
        return msgspec.structs.replace(message, prompt=_decoder.decode(data))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"undecodable prompt: {error}") from error


async def _read(bus: Bus, held: HeldPrompt, deadline_s: float) -> bytearray:
    data, subject = bytearray(), gateway_prompts(held.gateway)
    while len(data) < held.num_bytes:
        request = ReadPrompt(number=held.number, offset=len(data))
        answer = await bus.request(subject, request, deadline_s=deadline_s)
        if not isinstance(answer, PromptRead) or not answer.data:
            raise ProtocolError(f"expected a part of a prompt, received {type(answer).__name__}")
        data += answer.data
    return data

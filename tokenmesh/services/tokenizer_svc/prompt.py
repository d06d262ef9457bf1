"""PromptTokenizer: turns the prompts of one model into Tokenized answers.

`tokenize` is the whole path: ids (render, media, encode), truncate, check, hash.
"""

from functools import partial
from typing import Final

import msgspec

from tokenmesh.services.tokenizer_svc.chat import ChatRenderer
from tokenmesh.services.tokenizer_svc.content_guard import ContentGuard
from tokenmesh.services.tokenizer_svc.embeds_layout import EmbedsLayout, place_tensors
from tokenmesh.services.tokenizer_svc.encoding import (
    bad_words_ids,
    check_bad_words,
    check_number,
    decode_ids,
    encode_texts,
    given_ids,
    token_limit,
    token_strings,
    truncate_ids,
)
from tokenmesh.services.tokenizer_svc.loading import LoadedTokenizer
from tokenmesh.services.tokenizer_svc.media.asking import asking_of
from tokenmesh.services.tokenizer_svc.media.audio import AudioPreparer
from tokenmesh.services.tokenizer_svc.media.loader import MediaLoader
from tokenmesh.services.tokenizer_svc.media.media_model import (
    NOUNS,
    MediaModel,
    StoredItem,
    shift_items,
)
from tokenmesh.services.tokenizer_svc.media.processor import ItemText
from tokenmesh.services.tokenizer_svc.messages import ChatInput, read_conversation
from tokenmesh.services.tokenizer_svc.parser_choice import ParserNames
from tokenmesh.services.tokenizer_svc.prompt_text import PromptIds, PromptText
from tokenmesh.services.tokenizer_svc.score_pairs import ScorePairs
from tokenmesh.services.tokenizer_svc.text_encoder import TextEncoder
from tokenmesh.services.tokenizer_svc.texts import TextBatch
from tokenmesh.services.tokenizer_svc.threads import Threads
from tokenmesh.shared.config.model import TokenizerSettings
from tokenmesh.shared.errors import (
    InvalidInput,
    PayloadTooLarge,
    ProtocolError,
    field_name,
)
from tokenmesh.shared.hashing import chain_head, route_hashes, route_scope
from tokenmesh.shared.ids import BlobKey, ModelName
from tokenmesh.shared.messages.audio import PrepareAudio, SpeechAsk, SpeechFacts
from tokenmesh.shared.messages.media import AUDIO, MediaItem
from tokenmesh.shared.messages.tokenize import (
    ChatPrompt,
    FieldWarning,
    HeldPrompt,
    IdsPrompt,
    TextPrompt,
    TextsTokenized,
    Tokenize,
    Tokenized,
    TokenizeTexts,
)
from tokenmesh.shared.telemetry.span import span
from tokenmesh.shared.tokens import count_ids, pack_ids

_INLINE_JSON_BYTES: Final = 64 * 1024
"""Messages up to this length are decoded on the event loop, in less than a millisecond."""
_JSON_BYTES_PER_CHAR: Final = 20
"""Bytes of JSON that are decoded in the time of encoding one character."""


class PromptTokenizer:
    def __init__(
        self,
        name: ModelName,
        model: LoadedTokenizer,
        media_model: MediaModel | None,
        limits: TokenizerSettings,
        *,
        chat: ChatRenderer,
        media: MediaLoader,
        threads: Threads,
        parsers: ParserNames,
        guard: ContentGuard | None = None,
        audio: AudioPreparer | None = None,
        speech: SpeechFacts | None = None,
    ) -> None:
        """`guard` None: special tokens are allowed in message contents."""
        self.model = model
        self.parsers = parsers
        self.audio = audio
        self.speech = speech
        self._name = name
        self._media_model = media_model
        self._limits = limits
        self._chat = chat
        self._media = media
        self._threads = threads
        self._guard = guard
        self._encoder = TextEncoder(model.tokenizer, model.lean_json)
        self._text = PromptText(self._encoder, threads, model.length_bound)
        self._texts = TextBatch(
            self._encoder,
            limits,
            threads,
            model.length_bound,
            has_type_ids=model.has_type_ids,
            around=model.around_text,
            embed_ids=frozenset() if media_model is None else media_model.embed_ids,
        )
        self._pairs = ScorePairs(
            model.score_template, model.tokenizer, limits, threads, self._pair_ids
        )
        self._scope = route_scope(name, model.fingerprint, limits.route_block_tokens)
        self._route_head = chain_head(self._scope)

    async def tokenize(self, message: Tokenize) -> Tokenized:
        """Tokenize a prompt. Raises InvalidInput and its subclasses, and Overloaded."""
        limit = token_limit(message.truncate_prompt_tokens, self.model.max_model_len)
        prompt = message.prompt
        if isinstance(prompt, IdsPrompt) and limit is None and message.max_tokens is not None:
            num_ids = count_ids(prompt.token_ids)
            if num_ids > message.max_tokens:
                return Tokenized(token_ids=b"", too_many=num_ids)
        banned = await self._bad_words(message)
        warnings: list[FieldWarning] = []
        encoded = await self._ids(message, limit, warnings)
        ids, stored, layout = encoded.ids, encoded.stored, encoded.layout
        items = list(prompt.media) if isinstance(prompt, IdsPrompt) else []
        if self._media_model is not None:
            expand = partial(self._media_model.expanded, ids, stored)
            ids, found = await self._threads.run_text(message.tenant, len(ids), expand)
            items += found
        if layout is not None:
            fill = partial(layout.filled, ids, items)
            ids, items = await self._threads.run_text(message.tenant, len(ids), fill)
        kept = truncate_ids(ids, limit, message.truncation_side)
        if message.max_tokens is not None and len(kept) > message.max_tokens:
            return Tokenized(token_ids=b"", too_many=len(kept))
        if len(kept) < len(ids):
            num_lost = len(ids) - len(kept) if message.truncation_side == "left" else 0
            items = shift_items(items, num_lost, len(kept))
        packed = pack_ids(kept)
        strings: list[str] | None = None
        if message.return_token_strs:
            work = partial(token_strings, self.model.tokenizer, kept)
            strings = await self._threads.run_text(message.tenant, len(kept), work)
        return Tokenized(
            prediction_ids=await self._prediction(message),
            token_ids=packed,
            route_hashes=self._hash(packed, message, items),
            route_head=self._route_head,
            media=items,
            bad_words_ids=banned,
            token_strs=strings,
            warnings=warnings,
            offsets=None if items else await self._offsets(message, limit, encoded.text, kept),
        )

    async def tokenize_texts(self, message: TokenizeTexts, deadline_s: float) -> TextsTokenized:
        """Texts, or pairs. Raises InvalidInput that names a text, Overloaded, DeadlineExceeded."""
        if not self._pairs.takes(message):
            return await self._texts.tokenize(message, deadline_s)
        self._texts.check(message)
        return await self._pairs.tokenize(message, deadline_s)

    async def _pair_ids(
        self, message: Tokenize, prompt: ChatPrompt, conversation: ChatInput
    ) -> list[int]:
        limit = token_limit(message.truncate_prompt_tokens, self.model.max_model_len)
        found = await self._rendered_ids(message, prompt, conversation, [], limit, [])
        return truncate_ids(found.ids, limit, message.truncation_side)

    async def _offsets(
        self, message: Tokenize, limit: int | None, text: str, kept: list[int]
    ) -> bytes | None:
        """`Tokenized.offsets` of a text that was encoded as a whole."""
        prompt = message.prompt
        if (
            not message.return_offsets
            or not text
            or not isinstance(prompt, ChatPrompt | TextPrompt)
        ):
            return None
        special, side = prompt.add_special_tokens, message.truncation_side
        work = partial(self._encoder.offsets, text, special, limit, side)
        ids, offsets = await self._threads.run_text(message.tenant, len(text), work)
        return pack_ids(offsets) if ids == kept else None

    async def detokenize(self, packed_ids: bytes, tenant: str) -> str:
        """The text of the ids, special tokens included. Raises InvalidInput and Overloaded."""
        check_number(packed_ids, "tokens")
        work = partial(
            decode_ids, self.model.tokenizer, packed_ids, self.model.vocab_size, "tokens"
        )
        return await self._threads.run_text(tenant, count_ids(packed_ids), work)

    async def _prediction(self, message: Tokenize) -> bytes:
        """Drafts follow from it and no token: what the context has no room for is cut off."""
        text = message.prompt.prediction if isinstance(message.prompt, ChatPrompt) else ""
        if not text:
            return b""
        if len(text) > self._limits.max_prompt_chars:
            raise PayloadTooLarge(
                f"the prediction has {len(text)} characters, at most "
                f"{self._limits.max_prompt_chars} (tokenizer.max_prompt_chars)",
                param="prediction",
            )
        limit = message.max_tokens or self.model.max_model_len
        cut = msgspec.structs.replace(
            message, truncate_prompt_tokens=limit, truncation_side="right", max_tokens=None
        )
        try:
            return pack_ids(await self._text.ids(text, False, limit, cut))
        except PayloadTooLarge as error:
            raise PayloadTooLarge(f"prediction: {error.message}", param="prediction") from error

    async def _ids(
        self, message: Tokenize, limit: int | None, warnings: list[FieldWarning]
    ) -> PromptIds:
        """The ids, with one for each run of tokens of an item or tensor, the items and tensors."""
        prompt = message.prompt
        if isinstance(prompt, IdsPrompt):
            read = partial(given_ids, prompt.token_ids, self.model.vocab_size)
            num_ids = count_ids(prompt.token_ids)
            return PromptIds(await self._threads.run_text(message.tenant, num_ids, read))
        if isinstance(prompt, TextPrompt):
            if len(prompt.text) > self._limits.max_prompt_chars:
                raise PayloadTooLarge(
                    f"the prompt has {len(prompt.text)} characters, at most "
                    f"{self._limits.max_prompt_chars} (tokenizer.max_prompt_chars)",
                    param="prompt",
                )
            text, special = prompt.text, prompt.add_special_tokens
            return PromptIds(await self._text.ids(text, special, limit, message), text=text)
        if isinstance(prompt, HeldPrompt):
            raise ProtocolError("the held prompt was not read")
        return await self._chat_ids(message, prompt, limit, warnings)

    async def _chat_ids(
        self,
        message: Tokenize,
        prompt: ChatPrompt,
        limit: int | None,
        warnings: list[FieldWarning],
    ) -> PromptIds:
        read = partial(read_conversation, prompt, self._limits)
        num_bytes = len(prompt.messages_json)
        conversation = (
            read()
            if num_bytes <= _INLINE_JSON_BYTES
            else await self._threads.run(message.tenant, num_bytes / _JSON_BYTES_PER_CHAR, read)
        )
        stored = await self._load_media(conversation, message, prompt)
        return await self._rendered_ids(message, prompt, conversation, stored, limit, warnings)

    async def ask(self, message: PrepareAudio, ask: SpeechAsk) -> list[int]:
        """The prompt of a clip, with one token that takes its embeddings. Raises InvalidInput."""
        asking = asking_of(self.model)
        if asking is None:
            raise InvalidInput(f"the model {self._name} cannot be asked", param="model")
        question = asking.write(ask, self.model)
        num_chars = len(ask.prompt) + sum(map(len, ask.keywords))
        await self._threads.run_text(message.tenant, num_chars, partial(self._check, ask))
        prompt = ChatPrompt(
            messages_json=b"",
            add_generation_prompt=not question.continues,
            continue_final_message=question.continues,
        )
        given = Tokenize(
            request_id=message.request_id,
            model=message.model,
            prompt=prompt,
            tenant=message.tenant,
        )
        if question.text:
            return await self._text.ids(question.text, False, None, given)
        conversation = ChatInput(question.messages, None, None, {}, [])
        clip = StoredItem("", BlobKey(""), ItemText("", [1]), AUDIO)
        return (await self._rendered_ids(given, prompt, conversation, [clip], None, [])).ids

    def _check(self, ask: SpeechAsk) -> None:
        """Refuse texts of a client that hold special tokens."""
        special = frozenset(self.model.special_ids)
        texts = {"prompt": ask.prompt, "keywords": "\n".join(ask.keywords)}
        found = encode_texts(self.model.tokenizer, [*texts.values()])
        for name, ids in zip(texts, found, strict=True):
            if not special.isdisjoint(ids):
                raise InvalidInput(f"{name} holds special tokens of the model", param=name)

    async def _rendered_ids(
        self,
        message: Tokenize,
        prompt: ChatPrompt,
        conversation: ChatInput,
        stored: list[StoredItem],
        limit: int | None,
        warnings: list[FieldWarning],
    ) -> PromptIds:
        with span("render", {"tokenmesh.messages": len(conversation.messages)}):
            rendered = await self._chat.render(
                self.model, prompt, conversation, self._placeholders, message.tenant
            )
            text = rendered.text
            warnings.extend(rendered.warnings)
            if self._guard is not None:
                hidden, table = await self._hidden(
                    self._guard, text, message.tenant, prompt, conversation
                )
        if self._media_model is not None:
            text = text if self._guard is None else hidden
            insert = partial(self._media_model.inserted, text, stored)
            text, stored = await self._threads.run_text(message.tenant, len(text), insert)
            hidden = text
        layout: EmbedsLayout | None = None
        special = prompt.add_special_tokens
        if conversation.embeds:
            taken = self._media_model.embed_ids if self._media_model is not None else frozenset()
            frame = self._encoder.frame(is_pair=False, with_special=special)
            source = text if self._guard is None else hidden
            work = partial(
                place_tensors, source, conversation.embeds, self.model.tokenizer, taken, frame
            )
            layout, text = await self._threads.run_text(message.tenant, len(source), work)
            hidden = text
        # Truncation follows after the placeholders are expanded.
        limit = None if self._media_model is not None or layout is not None else limit
        if self._guard is None:
            ids = await self._text.ids(text, special, limit, message)
            return PromptIds(ids, stored, layout, text)
        encode = partial(self._guard.encode, hidden, table, special)
        ids = await self._text.ids_by(encode, text, len(text), message)
        return PromptIds(ids, stored, layout)

    @property
    def _placeholders(self) -> dict[str, str]:
        return self._media_model.placeholders if self._media_model is not None else {}

    async def _hidden(
        self,
        guard: ContentGuard,
        text: str,
        tenant: str,
        prompt: ChatPrompt,
        conversation: ChatInput,
    ) -> tuple[str, dict[int, int]]:
        """A rendering in which characters of the contents are replaced, and the replacements."""
        threads, cost = self._threads, len(text)
        await threads.run_text(tenant, cost, partial(guard.check, conversation))
        for table in guard.tables:
            hide = partial(guard.hidden, conversation, table)
            other = await threads.run_text(tenant, cost, hide)
            hidden = await self._chat.render(self.model, prompt, other, self._placeholders, tenant)
            show = partial(guard.shown, hidden.text, table)
            if await threads.run_text(tenant, cost, show) == text:
                return hidden.text, table
        raise guard.refusal()

    async def _load_media(
        self, conversation: ChatInput, message: Tokenize, prompt: ChatPrompt
    ) -> list[StoredItem]:
        if not conversation.media:
            return []
        for part in conversation.media:
            if part.kind not in self._placeholders:
                known = " and ".join(["text", *(NOUNS[kind] for kind in self._placeholders)])
                raise InvalidInput(
                    f"{field_name(part.path)}: the model {self._name} accepts {known} only",
                    param="messages",
                    path=part.path,
                )
        assert self._media_model is not None
        scope = f"{self._name}\0{message.tenant}\0{message.cache_salt or ''}"
        options = prompt.mm_processor_kwargs_json or b""
        return await self._media.load(
            conversation.media, self._media_model, scope, message.tenant, options
        )

    async def _bad_words(self, message: Tokenize) -> list[list[int]]:
        words = message.bad_words
        if not words:
            return []
        num_chars = check_bad_words(words, self._limits.max_bad_words)
        work = partial(bad_words_ids, self.model.tokenizer, words)
        return await self._threads.run_text(message.tenant, num_chars, work)

    def _hash(self, packed: bytes, message: Tokenize, items: list[MediaItem]) -> bytes:
        with span("hash"):
            return route_hashes(
                packed,
                self._limits.route_block_tokens,
                self._scope,
                lora=message.lora,
                salt=message.cache_salt,
                media=items,
            )

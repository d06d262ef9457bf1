"""Process entry of tokenizer_svc."""

import asyncio
import logging
from contextlib import AsyncExitStack

from tokenmesh.services.tokenizer_svc.actor import TokenizerActor
from tokenmesh.services.tokenizer_svc.chat import ChatRenderer
from tokenmesh.services.tokenizer_svc.content_guard import ContentGuard
from tokenmesh.services.tokenizer_svc.loading import LoadedTokenizer, forbid_torch, load_model
from tokenmesh.services.tokenizer_svc.media.audio import AudioPreparer
from tokenmesh.services.tokenizer_svc.media.fetch import Fetcher
from tokenmesh.services.tokenizer_svc.media.loader import MediaLoader
from tokenmesh.services.tokenizer_svc.media.media_model import media_model
from tokenmesh.services.tokenizer_svc.media.speech import speech_facts
from tokenmesh.services.tokenizer_svc.parser_choice import choose_parsers
from tokenmesh.services.tokenizer_svc.prompt import PromptTokenizer
from tokenmesh.services.tokenizer_svc.threads import Threads
from tokenmesh.shared import subjects
from tokenmesh.shared.allocator import give_back_freed_memory
from tokenmesh.shared.blobs import Blobs
from tokenmesh.shared.clock import wall_s
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.errors import CheckpointError, ConfigError
from tokenmesh.shared.ids import ModelName
from tokenmesh.shared.messages.beat import ModelCard
from tokenmesh.shared.parser_names import names_in
from tokenmesh.shared.service import Mesh, run_service

logger = logging.getLogger(__name__)


async def build(mesh: Mesh) -> None:
    """Load every model, then listen on all of its names."""
    shared = SharedResources(mesh.settings, mesh.blobs)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(shared.stop)
        models, cards = {}, []
        for settings in mesh.settings.models:
            try:
                tokenizer = await shared.prompt_tokenizer(settings)
            except (CheckpointError, ConfigError) as error:
                if not mesh.settings.service.skip_broken_models:
                    raise
                logger.error("%s is not served: %s", settings.name, error)
                mesh.note_broken(_names(settings), error)
                continue
            models.update(dict.fromkeys(_names(settings), tokenizer))
            cards += cards_of(settings, tokenizer.model)
        actor = TokenizerActor(models, shared.stop, mesh.bus)
        for name in models:
            subject = subjects.tokenize(name)
            await mesh.listen(actor, subjects.replica(subject, mesh.instance_id))
            await mesh.listen(actor, subject, queue=mesh.service)
        mesh.set_tokenizes(cards)
        # From here on the actor stops them.
        stack.pop_all()


class SharedResources:
    """Resources that all models of a process share: threads, child processes, connections."""

    def __init__(self, settings: Settings, blobs: Blobs) -> None:
        self._limits = settings.tokenizer
        files = settings.gateway.parser_files
        of_files = {name for path in files for name in names_in(path)}
        self._parser_plugins = frozenset(settings.gateway.parser_plugins) | of_files
        self._threads = Threads(self._limits)
        self._chat = ChatRenderer(self._limits)
        self._fetcher = Fetcher(self._limits.media)
        self._media = MediaLoader(self._limits.media, blobs, self._fetcher, self._threads)
        self._blobs = blobs
        self._audio: list[AudioPreparer] = []

    async def prompt_tokenizer(self, settings: ModelSettings) -> PromptTokenizer:
        """Load one model. Raises CheckpointError or ConfigError."""
        loaded = await asyncio.to_thread(load_model, settings)
        parsers = choose_parsers(settings, loaded.templates.values(), self._parser_plugins)
        media = await asyncio.to_thread(media_model, loaded, settings, self._limits.media)
        if media is not None:
            await self._media.prepare(media)
        speech = await asyncio.to_thread(speech_facts, loaded, media)
        audio: AudioPreparer | None = None
        if speech is not None:
            audio = AudioPreparer(
                self._limits.media, self._blobs, loaded.directory, speech.window_s
            )
            self._audio.append(audio)
            if speech.embed_id < 0:  # others are used for chats, and may never transcribe
                await audio.start()
        guard: ContentGuard | None = None
        if not settings.allow_special_tokens_in_content:
            guard = await asyncio.to_thread(ContentGuard, loaded.tokenizer)
        await self._chat.check(loaded, is_configured=settings.chat_template is not None)
        logger.info(
            "%s: %d tokens, media: %s, reasoning parser: %s, tool parser: %s",
            settings.name,
            loaded.vocab_size,
            ", ".join(media.kinds) if media is not None else "none",
            parsers.reasoning or "none",
            parsers.tools or "none",
        )
        return PromptTokenizer(
            ModelName(settings.name),
            loaded,
            media,
            self._limits,
            chat=self._chat,
            media=self._media,
            threads=self._threads,
            parsers=parsers,
            guard=guard,
            audio=audio,
            speech=speech,
        )

    async def stop(self) -> None:
        """Stop processes, close connections and end threads."""
        await self._chat.stop()
        await self._media.stop()
        for audio in self._audio:
            await audio.stop()
        await self._fetcher.stop()
        self._threads.stop()


def run(settings: Settings) -> int:
    """Run until a signal; returns the exit code."""
    forbid_torch()
    # a long prompt is in here as several large blocks at a time: as sent, decoded, rendered, hidden
    give_back_freed_memory()
    return run_service("tokenizer", settings, build)


def _names(settings: ModelSettings) -> list[ModelName]:
    return [ModelName(name) for name in settings.served_model_name or (settings.name,)]


def cards_of(settings: ModelSettings, loaded: LoadedTokenizer) -> list[ModelCard]:
    """The model's card; none if the checkpoint does not state the model's length."""
    if loaded.max_model_len is None:
        return []
    name, *aliases = _names(settings)
    card = ModelCard(
        name=name,
        aliases=aliases,
        max_model_len=loaded.max_model_len,
        vocab_size=loaded.vocab_size,
        created_s=wall_s(),
        eos_token_ids=loaded.eos_token_ids,
    )
    return [card]

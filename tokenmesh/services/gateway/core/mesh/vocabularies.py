"""Vocabularies: each model's tokenizer, loaded from a tokenizer service and kept up to date."""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from tokenmesh.services.gateway.core.generation.parsing import ModelText
from tokenmesh.services.gateway.core.mesh.calls import ServiceCalls
from tokenmesh.services.gateway.parsers.registry import ParserRegistry
from tokenmesh.shared.allocator import trim_heap
from tokenmesh.shared.clock import monotonic_s, now_s
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import InvalidInput, PromptTooLong, ProtocolError, TokenMeshError
from tokenmesh.shared.ids import ModelName, RequestId
from tokenmesh.shared.messages import (
    Describe,
    Described,
    ReadTokenizer,
    TextsTokenized,
    Tokenize,
    TokenizerRead,
    TokenizeTexts,
)
from tokenmesh.shared.subjects import tokenize as tokenize_subject
from tokenmesh.shared.text import Vocabulary
from tokenmesh.shared.tokens import unpack_ids


@dataclass(slots=True)
class _Entry:
    text: ModelText
    refreshed_s: float


class Vocabularies:
    """A bounded cache by model. A stale entry is used while it is refreshed."""

    def __init__(self, calls: ServiceCalls, settings: GatewaySettings) -> None:
        """Raises ConfigError for a parser of others that cannot be imported."""
        self._calls = calls
        self._settings = settings
        self._parsers = ParserRegistry(settings.parser_plugins, settings.parser_files)
        self._entry_by_model: OrderedDict[ModelName, _Entry] = OrderedDict()
        self._loading: dict[ModelName, asyncio.Task[ModelText]] = {}

    async def get(self, model: ModelName) -> ModelText:
        """Raises NoResponders and similar errors if no tokenizer of the model can be reached."""
        entry = self._entry_by_model.get(model)
        if entry is None:
            return await asyncio.shield(self._load_once(model))
        self._entry_by_model.move_to_end(model)
        if monotonic_s() - entry.refreshed_s >= self._settings.describe_ttl_s:
            entry.refreshed_s = monotonic_s()
            self._load_once(model)
        return entry.text

    def _load_once(self, model: ModelName) -> "asyncio.Task[ModelText]":
        """One load for each model at a time, shared by all that wait for it."""
        task = self._loading.get(model)
        if task is None:
            task = self._loading[model] = asyncio.create_task(self._load(model))
            task.add_done_callback(lambda done: self._loaded(model, done))
        return task

    def _loaded(self, model: ModelName, task: "asyncio.Task[ModelText]") -> None:
        del self._loading[model]
        # A refresh that fails leaves the old entry in use; it is repeated later.
        if not task.cancelled() and not isinstance(task.exception(), TokenMeshError | None):
            task.result()

    async def _load(self, model: ModelName) -> ModelText:
        timeout_s = self._settings.tokenize_timeout_s
        described = await self._calls.request(
            tokenize_subject(model),
            Describe(model=model),
            Described,
            timeout_s=timeout_s,
            deadline_s=now_s() + timeout_s,
        )
        known = self._entry_by_model.get(model)
        family = self._parsers.family(
            described.reasoning_parser, described.tool_call_parser, described.reasoning_end
        )
        if (
            known is not None
            and known.text.described.fingerprint == described.fingerprint
            and known.text.vocabulary.has_markers(family.markers)
        ):
            vocabulary = known.text.vocabulary
        else:
            tokenizer_json = await self._read(model, described.fingerprint)
            markers = await self._encode(model, family.markers)
            # Parsing a large vocabulary takes some tenths of a second.
            vocabulary = await asyncio.to_thread(
                _loaded, model, tokenizer_json, described.special_ids, markers
            )
        text = ModelText(described, vocabulary, _defaults(described), family)
        self._keep(model, text)
        return text

    async def encode(self, field: str, message: Tokenize) -> list[int]:
        """The ids of a text in the client's `field`, from any tokenizer of the model.

        Raises InvalidInput and its subclasses, and what calls of tokenizers raise.
        """
        try:
            answer = await self._calls.tokenize(
                message, now_s() + self._settings.tokenize_timeout_s
            )
            if answer.too_many:
                raise PromptTooLong.over(
                    message.max_tokens or 0,
                    f"your prompt resulted in {answer.too_many} tokens",
                    "the length of the prompt",
                    param="prompt",
                )
        except InvalidInput as error:
            raise error.renamed(field) from error
        return unpack_ids(answer.token_ids)

    async def _encode(self, model: ModelName, texts: Sequence[str]) -> dict[str, list[int]]:
        """The ids of each text, from any tokenizer of the model."""
        if not texts:
            return {}
        timeout_s = self._settings.tokenize_timeout_s
        answer = await self._calls.request(
            tokenize_subject(model),
            TokenizeTexts(
                # read once for a model: the trace of the request that waits is not named by it
                request_id=RequestId(""),
                model=model,
                texts=list(texts),
                add_special_tokens=False,
            ),
            TextsTokenized,
            timeout_s=timeout_s,
            deadline_s=now_s() + timeout_s,
        )
        return dict(zip(texts, map(unpack_ids, answer.token_ids), strict=True))

    async def _read(self, model: ModelName, fingerprint: str) -> str:
        """The tokenizer's JSON text in parts, each from any tokenizer of the model."""
        text, num_bytes = bytearray(), 1
        timeout_s = self._settings.tokenize_timeout_s
        while len(text) < num_bytes:
            part = await self._calls.request(
                tokenize_subject(model),
                ReadTokenizer(model=model, fingerprint=fingerprint, offset=len(text), lean=True),
                TokenizerRead,
                timeout_s=timeout_s,
                deadline_s=now_s() + timeout_s,
            )
            num_bytes = part.num_bytes
            if not part.data or num_bytes > self._settings.max_tokenizer_bytes:
                raise ProtocolError(f"the tokenizer of {model!r} has a text of {num_bytes} bytes")
            text += part.data
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            raise ProtocolError(f"the tokenizer of {model!r} is not UTF-8: {error}") from error

    def _keep(self, model: ModelName, text: ModelText) -> None:
        self._entry_by_model[model] = _Entry(text, monotonic_s())
        self._entry_by_model.move_to_end(model)
        if len(self._entry_by_model) > self._settings.max_vocabularies:
            self._entry_by_model.popitem(last=False)


def _defaults(described: Described) -> dict[str, object]:
    try:
        return msgspec.json.decode(described.default_sampling_json, type=dict[str, object])
    except msgspec.DecodeError as error:
        raise ProtocolError(f"default_sampling_json is not valid: {error}") from error


def _loaded(
    model: ModelName, text: str, special_ids: Sequence[int], markers: dict[str, list[int]]
) -> Vocabulary:
    try:
        return Vocabulary.load(text, special_ids, markers)
    except ValueError as error:
        raise ProtocolError(f"the tokenizer of {model!r} cannot be read: {error}") from error
    finally:
        # parsing takes several times the memory of what is kept
        trim_heap()

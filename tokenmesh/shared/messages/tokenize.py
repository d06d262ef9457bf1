"""Messages to tokenizer_svc: text and media to token ids and block hashes, and back.

Free-form JSON (messages, tools, template arguments) travels as JSON bytes and is decoded once, by
the tokenizer: no service in between reads it.
"""

from typing import Final, Literal

import msgspec

from tokenmesh.shared.errors import FieldPath
from tokenmesh.shared.ids import BlobKey, GatewayId, ModelName, RequestId
from tokenmesh.shared.messages.audio import SpeechFacts
from tokenmesh.shared.messages.media import MediaItem

PROMPT_PART_BYTES: Final = 256 * 1024
"""A prompt that takes more is read from its gateway, so much at a time."""
BAD_WORDS_CHARS: Final = 65_536
"""Most characters of all bad words of a request together: each is encoded twice."""


class TextPrompt(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """A prompt as text, not a conversation."""

    text: str
    add_special_tokens: bool = True


class IdsPrompt(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """A prompt that the client tokenized itself; only truncation and hashing are left to do."""

    token_ids: bytes
    media: list[MediaItem] = []
    """Embeddings that the client gives in place of tokens."""


class ChatPrompt(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """A conversation for the chat template. `*_json` fields hold UTF-8 JSON."""

    messages_json: bytes
    """A list of OpenAI chat messages; data URIs were already replaced by `blob:<key>` URLs, and
    the `data` of tensors, which have a `length` then."""
    tools_json: bytes | None = None
    documents_json: bytes | None = None
    template_kwargs_json: bytes | None = None
    chat_template: str | None = None
    """Replaces the model's own template."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    mm_processor_kwargs_json: bytes | None = None
    """Options of the processor of images in place of the model's own."""
    merges_system: bool = False
    """True: all system messages become the first one where the template takes none behind it."""
    prediction: str = ""
    """The answer may be close to it; it is encoded by itself."""


class HeldPrompt(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """A large prompt, packed as one of the above: a tokenizer reads it from the gateway."""

    gateway: GatewayId
    number: int
    num_bytes: int


class ReadPrompt(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Request a part of a HeldPrompt from its gateway."""

    number: int
    offset: int = 0
    """Bytes that are there already."""


class PromptRead(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """A part of the answer, at most `PROMPT_PART_BYTES`; empty behind the end."""

    data: bytes


class Tokenize(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Request the ids of one prompt. Answered with Tokenized or Failed."""

    request_id: RequestId
    model: ModelName
    prompt: TextPrompt | IdsPrompt | ChatPrompt | HeldPrompt
    truncate_prompt_tokens: int | None = None
    """Keep at most this many tokens; -1 means the model's context length."""
    truncation_side: Literal["left", "right"] = "left"
    bad_words: list[str] = []
    cache_salt: str | None = None
    lora: str | None = None
    return_token_strs: bool = False
    return_offsets: bool = False
    """Asks for the place of each token in a text."""
    max_tokens: int | None = None
    """Ids of a longer prompt are not needed, see `Tokenized.too_many`; None: no limit."""
    context_tokens: int | None = None
    """The context of the model: a text that has more tokens for certain is refused before it is
    encoded."""
    tenant: str = ""
    """Whose request it is: tenants take turns, and what a client calls its images is known to its
    tenant only."""


class FieldWarning(msgspec.Struct, frozen=True, omit_defaults=True):
    """A field of a prompt that is used otherwise than it was sent."""

    path: FieldPath
    problem: str


class Tokenized(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The ids of a prompt, with media placeholders expanded."""

    token_ids: bytes
    route_hashes: bytes = b""
    """8 bytes little-endian for every full route block, chained (see shared/hashing.py)."""
    route_head: bytes = b""
    """8 bytes that the chain begins with: a worker goes on with it; empty: outside of the index."""
    media: list[MediaItem] = []
    bad_words_ids: list[list[int]] = []
    token_strs: list[str] | None = None
    too_many: int = 0
    """Tokens of a prompt with more than `Tokenize.max_tokens`; then all other fields are empty."""
    warnings: list[FieldWarning] = []
    offsets: bytes | None = None
    """Two numbers for each id, packed like ids: where it begins and ends in the text, in
    characters; None: not wanted, or of no text alone."""
    prediction_ids: bytes = b""
    """The ids of `ChatPrompt.prediction`, at most as many as the context has room for."""


class TokenizeTexts(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Request the ids of many texts, or pairs of texts. Answered with TextsTokenized or Failed."""

    request_id: RequestId
    model: ModelName
    texts: list[str]
    """One text, or as many as `pairs`, where there are pairs."""
    pairs: list[str] = []
    """The second text of each pair; empty: single texts."""
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    """Keep at most this many tokens of each; -1 means the model's context length."""
    truncation_side: Literal["left", "right"] = "right"
    context_tokens: int | None = None
    """The context of the model: a text that has more tokens is refused, with their number as
    `param`."""
    tenant: str = ""
    """Whose request it is: tenants take turns."""
    max_text_tokens: int | None = None
    """Keep at most this many tokens of each first text, before special tokens are added."""
    max_pair_tokens: int | None = None
    """The same of each second text."""
    chat_template: str | None = None
    """Writes each pair as a prompt, in place of the model's template for scores, if it has one."""
    template_kwargs_json: bytes | None = None
    """Variables of that template, as UTF-8 JSON."""


class TextsTokenized(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The ids of the texts of a TokenizeTexts, in their order."""

    token_ids: list[bytes]
    type_ids: list[bytes] = []
    """One byte for each token: which text of a pair it belongs to; empty where there are none."""


class Detokenize(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Request the text of token ids."""

    request_id: RequestId
    model: ModelName
    token_ids: bytes
    tenant: str = ""
    """Whose request it is: tenants take turns."""


class Detokenized(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The text of the ids of a Detokenize."""

    text: str


class Describe(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Request what a gateway needs to detokenize a model's output itself."""

    model: ModelName


class Described(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Facts about a model's tokenizer; they never change while the process lives."""

    tokenizer: BlobKey = BlobKey("")
    """Not used any more: see ReadTokenizer."""
    fingerprint: str
    """Hex digest of the `tokenizer.json` text: a gateway reads that only when it changes."""
    vocab_size: int
    """Ids at or above this are invalid in a prompt."""
    special_ids: list[int]
    """Ids that `skip_special_tokens` drops."""
    has_chat_template: bool
    default_sampling_json: bytes = b"{}"
    """The sampling fields of the model's generation_config.json (temperature, top_p, ...)."""
    reasoning_parser: str = ""
    """Name of the parser that separates reasoning from content; empty: the model has none."""
    tool_call_parser: str = ""
    """Name of the parser that separates tool calls from content; empty: the model has none."""
    prompts: dict[str, str] = {}
    """Texts that sentence-transformers puts before a text, by the purpose of its embedding."""
    speech: SpeechFacts | None = None
    """Facts for transcripts of recordings; None: it makes none."""
    reasoning_end: str = ""
    """The text that the model writes when a budget of reasoning is spent; empty: the parser's
    marker."""
    detects_parsers: bool = False
    """True where the operator has named no parser, so that those above follow from the template."""
    padding_id: int | None = None
    """The token that fills up prompts; None: the tokenizer has none."""


class ReadTokenizer(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Request a part of a model's `tokenizer.json`, also where it ships in another format.

    Any tokenizer of the model can answer; one with another text answers Failed(unavailable).
    """

    model: ModelName
    fingerprint: str
    offset: int = 0
    """Bytes of the text that are there already."""
    lean: bool = False
    """True: the answer may leave out what only turns text into ids; older tokenizers send all of
    it."""


class TokenizerRead(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """A part of the text, as much as fits a message."""

    data: bytes
    num_bytes: int
    """The size of the whole text."""


class ReadTokenizerConfig(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Request a model's tokenizer_config.json."""

    model: ModelName


class TokenizerConfigRead(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """It, with the chat template that is in force."""

    config_json: bytes

"""Bodies of the routes that answer with numbers. Names, ranges and meanings are vLLM's."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from tokenmesh.services.gateway.apis.openai.request import ChatMessage
from tokenmesh.services.gateway.apis.openai.sampling_fields import NotServed
from tokenmesh.services.gateway.core.http.fields import (
    Bounded,
    Flag,
    MinusOneOrMore,
    NotNegative,
    Off,
    Positive,
    Priority,
    TokenId,
    default_for_null,
)
from tokenmesh.shared.messages.pooling import PoolTask

EncodingFormat = Literal["float", "base64", "bytes", "bytes_only"]
EmbedDtype = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Endianness = Literal["native", "little", "big"]
CohereType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]

_Texts = str | list[str]
_Count = Annotated[NotNegative, default_for_null(NotNegative, 0)]


class PoolingFields(Bounded):
    """It holds what all routes share."""

    model_config = ConfigDict(
        extra="allow", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    model: str | None = None
    """One of the served models; may be left out where there is only one."""
    priority: Priority = 0
    """A lower number is served first, also before requests that wait already."""

    @property
    def unknown_fields(self) -> list[str]:
        """Names of top-level fields that are not declared."""
        return list(self.model_extra or ())


class PromptFields(PoolingFields):
    """It holds what all routes but Cohere's share."""

    truncate_prompt_tokens: MinusOneOrMore | None = None
    """Cuts each prompt to so many tokens; -1: to the model's length. Without it a longer prompt is
    a 400."""
    truncation_side: Literal["left", "right"] | None = None
    """Where a prompt is cut. Default right."""
    use_activation: Flag | None = None
    """Normalize embeddings, apply softmax or sigmoid to scores. Default: as the model says."""
    normalize: Flag | None = None
    """Another name of `use_activation`."""
    cache_salt: str | None = Field(default=None, min_length=1, max_length=1024)
    """Prompts share cached blocks only with prompts of the same salt."""
    request_id: str | None = Field(default=None, min_length=1)
    """The answer's id, in place of the header X-Request-Id."""
    user: str | None = None
    """Accepted, without effect."""

    mm_processor_kwargs: dict[str, Any] | None = None
    """Options of the processor of images, such as `max_pixels`, in place of the model's own."""

    padding: Literal["max_length", "do_not_pad", False] | None = None
    """`max_length`: prompts are filled up with the model's padding token, which the model reads
    like any other: for models that were trained on prompts of one length."""


class InputFields(PromptFields):
    """It holds what has prompts of any kind: `input` or `messages`."""

    input: str | list[TokenId] | list[str] | list[list[TokenId]] | None = None
    """A text, a list of texts, token ids, or a list of such lists."""
    messages: list[ChatMessage] | list[list[ChatMessage]] | None = Field(default=None, min_length=1)
    """In place of `input`: a conversation, or a list of conversations, for the chat template."""
    add_special_tokens: Flag | None = None
    """It tells whether the tokenizer adds special tokens. Default: to texts, not to
    conversations."""
    chat_template: str | None = None
    """In place of the model's own, where `tokenizer.trust_request_chat_template` allows it."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further arguments of the chat template."""
    add_generation_prompt: Off = False
    """It tells whether the prompt ends with the beginning of the assistant's message."""
    continue_final_message: Off = False
    """It tells whether the prompt ends within the last message."""

    media_io_kwargs: Annotated[dict[str, Any] | None, NotServed()] = None


class NumberFields(InputFields):
    """It says how numbers are written."""

    encoding_format: Annotated[EncodingFormat, default_for_null(EncodingFormat, "float")] = "float"
    """`float`: JSON numbers; `base64`: text of the bytes; `bytes`: the bytes of all inputs as the
    body, described by JSON in the header `metadata`; `bytes_only`: without that header."""
    embed_dtype: Annotated[EmbedDtype, default_for_null(EmbedDtype, "float32")] = "float32"
    """The type of numbers that are written as bytes."""
    endianness: Annotated[Endianness, default_for_null(Endianness, "native")] = "native"
    """The order of their bytes; native is little."""
    dimensions: Positive | None = None
    """Keep so many first dimensions of an embedding."""


class EmbeddingRequest(NumberFields):
    """OpenAI's and vLLM's embeddings."""


class PoolingRequest(NumberFields):
    """vLLM's pooling: the numbers of any task."""

    task: PoolTask | Literal["plugin"] | None = None
    """One of the model's tasks; without it the first of `embed`, `classify`, `token_embed` and
    `token_classify` that the model has."""


class ClassificationRequest(InputFields):
    """vLLM's body for classes."""


class ScoreFields(PromptFields):
    """It holds what scores and reranking share."""

    max_tokens_per_query: _Count = 0
    """Cuts the query to so many tokens; 0: not at all."""
    max_tokens_per_doc: _Count = 0
    """Cuts each document to so many tokens; 0: not at all."""

    instruction: str | None = None
    """For a model that scores pairs by a template: what to look for, the variable `instruction` of
    the template."""
    chat_template: str | None = None
    """Writes each pair, messages of the roles `query` and `document`, in place of the model's
    template for scores; where `tokenizer.trust_request_chat_template` allows it."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of that template."""

    @property
    def template_kwargs(self) -> dict[str, Any] | None:
        """All variables; those of `chat_template_kwargs` count first."""
        if self.instruction is None:
            return self.chat_template_kwargs
        return {"instruction": self.instruction, **(self.chat_template_kwargs or {})}


_Scored = str | dict[str, Any]


class ScoreRequest(ScoreFields):
    """vLLM's score, with all names that it has for the two sides of a pair."""

    text_1: _Scored | list[_Scored] | None = None
    """One text for all pairs, or the first text of each pair. Also `data_1` and `queries`. A text
    may be an object whose `content` is a list of parts, as in chats; there an image may stand in
    its place, for models that take images."""
    text_2: _Scored | list[_Scored] | None = None
    """The second texts. Also `data_2`, `documents` and `items`."""
    data_1: _Scored | list[_Scored] | None = None
    """Another name of `text_1`."""
    data_2: _Scored | list[_Scored] | None = None
    """Another name of `text_2`, with `data_1`."""
    queries: _Scored | list[_Scored] | None = None
    """Another name of `text_1`."""
    documents: _Scored | list[_Scored] | None = None
    """Another name of `text_2`, with `queries`."""
    items: _Scored | list[_Scored] | None = None
    """The same as `documents`."""


class RerankRequest(ScoreFields):
    """Reranking as Jina, Cohere and vLLM have it."""

    query: _Scored
    """A text, or an object with a `text` or with `content`: parts of a text, or an image."""
    documents: list[_Scored]
    """The same, one for each document."""
    top_n: _Count = 0
    """It says how many of the best documents are returned; 0: all."""
    return_documents: Flag | None = None
    """It tells whether results hold their documents. Default: yes."""

    rank_fields: Annotated[list[str] | None, NotServed(None, [], ["text"])] = None


class CohereEmbedRequest(PoolingFields):
    """Cohere's embed, version 2."""

    texts: list[str] | None = None
    """The texts."""
    images: list[str] | None = None
    """In place of `texts`, for models that take images: each a data URI."""
    inputs: list[dict[str, Any]] | None = None
    """In place of both: objects whose `content` is a list of parts of type text or image_url."""
    input_type: str | None = None
    """`search_query`, `search_document`, `classification`, `clustering` or the name of a prompt of
    the model: what sentence-transformers puts before a text for that purpose; `image` for images.
    """
    output_dimension: Positive | None = None
    """Keep so many first dimensions."""
    embedding_types: list[CohereType] | None = None
    """Default float. int8 is round(127 x), uint8 is that plus 128; binary and ubinary hold the
    signs, eight to a byte."""
    truncate: Annotated[
        Literal["NONE", "START", "END"], default_for_null(Literal["NONE", "START", "END"], "END")
    ] = "END"
    """It says which end of a text that is too long is cut; NONE: it is a 400. What holds images is
    not cut.
    """
    max_tokens: Positive | None = None
    """Cuts each text to so many tokens."""

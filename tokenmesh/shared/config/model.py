"""Settings of models and of the services that prepare prompts: tokenizer and encoder."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tokenmesh.shared.config.fixed import fixed
from tokenmesh.shared.config.on_demand import OnDemandModel
from tokenmesh.shared.config.speculative import SpeculativeConfig
from tokenmesh.shared.hashing import ROUTE_BLOCK_TOKENS
from tokenmesh.shared.messages.pooling import PoolTask

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
ModelImpl = Literal["auto", "native", "transformers"]
ModelRunner = Literal["auto", "generate", "pooling"]
ModelConvert = Literal["auto", "none", "embed", "classify"]
QuantizationName = Literal[
    "int8",
    "int4",
    "fp8",
    "awq",
    "awq_marlin",
    "bitsandbytes",
    "compressed-tensors",
    "fbgemm_fp8",
    "gguf",
    "gptq",
    "gptq_marlin",
    "modelopt",
    "modelopt_fp4",
    "modelopt_fp8",
    "modelopt_mixed",
    "modelopt_mxfp8",
    "mxfp4",
]


class ModelSettings(OnDemandModel):
    """One served model. Flags have vLLM's names."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(min_length=1, description="Directory, GGUF file or hub id of a checkpoint.")
    served_model_name: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(), description="Names clients may use; the first is canonical. Default: the model."
    )
    tokenizer: str | None = Field(
        default=None, description="Directory or hub id of the tokenizer, when not the model's."
    )
    revision: str | None = Field(default=None, description="Hub revision.")
    dtype: Dtype = Field(
        default="auto",
        description="Weights and activations; a CPU computes float16 in bfloat16 or float32.",
    )
    quantization: QuantizationName | None = Field(
        default=None,
        description="int8, int4, fp8: round the weights of linear layers when they are loaded. The "
        "others confirm how a checkpoint is quantized, which its config.json says anyway.",
    )
    model_impl: ModelImpl = Field(
        default="auto",
        description="native: our own decoder; transformers: its module tree; auto: native first.",
    )
    runner: ModelRunner = Field(
        default="auto",
        description="generate: text; pooling: numbers such as embeddings; auto: pooling for "
        "encoders, classifiers and checkpoints with modules.json, else generate.",
    )
    convert: ModelConvert = Field(
        default="auto",
        description="What a pooling model answers: embed or classify; auto and none: what its "
        "architecture is for.",
    )
    pooling_type: Literal["CLS", "LAST", "MEAN"] | None = Field(
        default=None,
        description="What an embedding is made of: the first token, the last one or all of them. "
        "Default: what the checkpoint says.",
    )
    pooling_task: PoolTask | None = Field(
        default=None, description="The one task of a pooling model that is served; default: all."
    )
    pooling_activation: bool | None = Field(
        default=None,
        description="Whether embeddings are normalized, and scores put through softmax or sigmoid, "
        "for requests that leave use_activation out. Default: as the checkpoint says.",
    )
    embed_in_chunks: bool = Field(
        default=False,
        description="Embed a text that is longer than the model in parts, and answer with the mean "
        "of their embeddings, weighted by their tokens.",
    )
    max_embed_len: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="Longest text that is embedded, tokens; default: any with embed_in_chunks, "
        "else the model's length.",
    )
    hf_overrides: dict[str, Any] = Field(
        default={},
        description="Keys of config.json that are read with these values instead; objects are "
        "merged.",
    )
    trust_remote_code: bool = Field(
        default=False,
        description="Run the model code that a checkpoint brings (`auto_map` in config.json), with "
        "all rights of the worker. Code of tokenizers is never run.",
    )
    max_model_len: Annotated[int, Field(ge=1)] | Literal["auto"] | None = Field(
        default=None,
        description="Longest prompt plus output, tokens; default: the checkpoint's; auto: as much "
        "of that as the worker's KV memory holds for one request.",
    )
    language_model_only: bool = Field(
        default=False, description="Load no tower, and refuse images, videos and audio."
    )
    limit_mm_per_prompt: dict[Literal["image", "video", "audio"], Annotated[int, Field(ge=0)]] = (
        Field(
            default={},
            description="Most media of a kind in one prompt, such as image: 4; of a kind that is "
            "not named, `tokenizer.media.max_images`.",
        )
    )
    chat_template: str | None = Field(
        default=None, description="File with, or text of, a Jinja template to use instead."
    )
    allow_special_tokens_in_content: bool = Field(
        default=True,
        description="Whether special tokens in the text of messages are special tokens, as in "
        "vLLM; false: they are encoded as ordinary text.",
    )
    generation_config: Literal["auto", "vllm"] = Field(
        default="auto",
        description="auto: defaults of generation_config.json, else of config.json; vllm: none.",
    )
    override_generation_config: dict[str, Any] = Field(
        default={},
        description="Sampling defaults that lie over those of generation_config, by its names.",
    )
    speculative_config: SpeculativeConfig = Field(
        default_factory=SpeculativeConfig,
        description="Drafts of the next tokens, which are computed along with the last one. Tokens "
        "stay the same, and come sooner.",
    )
    reasoning_end_str: str = Field(
        default="",
        max_length=4096,
        description="What a model writes when its thinking_token_budget is spent, before or with "
        "the marker that ends reasoning; default: the marker alone.",
    )
    reasoning_parser: str = Field(
        default="auto",
        description="How reasoning is separated from content: a parser's name, auto (from the "
        "chat template) or none.",
    )
    tool_call_parser: str = Field(
        default="auto",
        description="How tool calls are separated from content: a parser's name, auto (from the "
        "chat template) or none.",
    )

    @property
    def name(self) -> str:
        """The canonical served name."""
        return self.served_model_name[0] if self.served_model_name else self.model

    @property
    def stated_len(self) -> int | None:
        """`max_model_len` where it is a number; None: the checkpoint's length."""
        return None if self.max_model_len == "auto" else self.max_model_len


class MediaSettings(BaseModel):
    """It holds what tokenizer_svc fetches and decodes for a prompt. Times are seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_images: int = Field(default=100, ge=0, description="Images in one prompt.")
    max_bytes: int = Field(
        default=20 * 1024 * 1024, ge=1, description="Size of one image file as it is fetched."
    )
    max_pixels: int = Field(
        default=50_000_000, ge=1, description="Width times height of an image, before decoding it."
    )
    fetch_timeout_s: float = Field(
        default=10.0,
        gt=0,
        description="Time for one URL, redirects included, from when it is its turn.",
    )
    max_redirects: int = fixed(default=3, ge=0, description="Redirects followed for one URL.")
    max_concurrent_fetches: int = fixed(
        default=32, ge=1, description="URLs that one process fetches at a time."
    )
    allowed_domains: tuple[str, ...] = Field(
        default=(), description="Hosts that media may come from; empty: any public host."
    )
    allow_private_addresses: bool = Field(
        default=False,
        description="Fetch from loopback, private and link-local addresses too. Lets clients "
        "reach whatever this process can reach: only where all clients are trusted.",
    )
    max_fetches_per_tenant: int = fixed(
        default=16, ge=1, description="Of these, URLs of one tenant."
    )
    fetch_queue: int = fixed(
        default=1024, ge=1, description="URLs that wait to be fetched; above: overloaded."
    )
    decode_processes: int = fixed(
        default=2, ge=1, description="Processes that decode images, started when first needed."
    )
    decode_timeout_s: float = Field(
        default=10.0, gt=0, description="Time to decode one image; then its process is killed."
    )
    decode_memory_bytes: int = Field(
        default=4 * 1024**3, ge=1, description="Address space of a process that decodes media."
    )
    decode_queue: int = fixed(
        default=1024, ge=1, description="Images that wait for a process; above: overloaded."
    )
    max_videos: int = Field(default=4, ge=0, description="Videos in one prompt.")
    max_video_bytes: int = Field(
        default=64 * 1024 * 1024, ge=1, description="Size of one video file as it is fetched."
    )
    max_video_s: float = Field(
        default=3600.0, gt=0, description="Length of one video, before it is decoded."
    )
    max_video_frames: int = Field(
        default=768, ge=1, description="Frames that are taken of one video."
    )
    max_video_pixels: int = fixed(
        default=768 * 32**3, ge=1, description="Pixels of all resized frames of one video."
    )
    video_timeout_s: float = Field(
        default=60.0, gt=0, description="Time to decode one video; then its process is killed."
    )
    max_audio_bytes: int = Field(
        default=25 * 1024 * 1024, ge=1, description="Size of one audio file."
    )
    max_audio_s: float = Field(
        default=3600.0, gt=0, description="Length of one recording, before it is decoded."
    )
    audio_timeout_s: float = Field(
        default=30.0,
        gt=0,
        description="Time to decode a recording; then its process is killed.",
    )
    ttl_s: int = fixed(
        default=900, ge=1, description="How long pixels stay in Redis for encoder and retries."
    )


class TokenizerSettings(BaseModel):
    """One tokenizer process. Times are seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    threads: int = Field(default=2, ge=1, description="Threads that encode text and pixels.")
    max_prompt_chars: int = Field(
        default=4_000_000, ge=1, description="Characters in a prompt, rendered or not."
    )
    max_texts: int = fixed(
        default=4096, ge=1, description="Texts, or pairs of texts, in one message to be encoded."
    )
    max_messages: int = Field(default=10_000, ge=1, description="Messages in a conversation.")
    max_content_parts: int = fixed(
        default=10_000, ge=1, description="Content parts in all messages together."
    )
    max_tools: int = Field(default=1024, ge=0, description="Tools of a request.")
    max_documents: int = fixed(default=1024, ge=0, description="Documents of a request.")
    max_bad_words: int = fixed(default=1024, ge=0, description="Bad words of a request.")
    trust_request_chat_template: bool = Field(
        default=False,
        description="Accept chat templates in requests. They run in a sandbox in a process of "
        "their own, bounded in time and memory; the model's own runs in another one.",
    )
    render_processes: int = fixed(
        default=1, ge=1, description="Processes that render the models' own templates."
    )
    render_time_limit_s: float = fixed(
        default=2.0, gt=0, description="Time for one rendering; its process is killed after it."
    )
    render_memory_bytes: int = fixed(
        default=512 * 1024 * 1024, ge=1, description="Address space of a rendering process."
    )
    render_queue: int = fixed(
        default=1024, ge=1, description="Renderings that wait for a process; above: overloaded."
    )
    route_block_tokens: int = Field(
        default=ROUTE_BLOCK_TOKENS,
        ge=1,
        description="Tokens in a route block; the same in the whole mesh.",
    )
    media: MediaSettings = MediaSettings()


class EncoderSettings(BaseModel):
    """One encoder process. Times are seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Where the towers run; auto takes a GPU if there is one."
    )
    threads: int | None = Field(
        default=None, ge=1, description="torch threads; default: torch's own choice."
    )
    max_batch: int = fixed(default=8, ge=1, description="Items that a tower encodes at a time.")
    max_batch_embeddings: int = fixed(
        default=16384,
        ge=1,
        description="Embeddings of the items that a tower encodes at a time; one item may have "
        "more.",
    )
    batch_window_s: float = fixed(
        default=0.002, ge=0, description="How long the first image of a batch waits for others."
    )
    queue: int = Field(
        default=256, ge=1, description="Images that wait for the tower; above: overloaded."
    )
    max_items: int = fixed(default=256, ge=1, description="Media items in one request.")
    cache_bytes: int = Field(
        default=512 * 1024 * 1024, ge=0, description="Embeddings kept in this process."
    )
    blob_ttl_s: int = fixed(
        default=900, ge=1, description="How long embeddings stay in Redis after their last use."
    )

"""ModelSettings: which model, and how it is read."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
ModelImpl = Literal["auto", "native", "transformers"]


class ModelSettings(BaseModel):
    """One served model. Flags bear vLLM's names."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(description="Local directory or hub id of the checkpoint.")
    served_model_name: tuple[str, ...] = Field(
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
    model_impl: ModelImpl = Field(
        default="auto",
        description="native: our own decoder; transformers: its module tree; auto: native first.",
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
        description="auto: sampling defaults from generation_config.json; vllm: neutral defaults.",
    )

    reasoning_parser: str = Field(
        default="auto",
        description="How reasoning is told from content: a parser's name, auto (from the chat "
        "template) or none.",
    )
    tool_call_parser: str = Field(
        default="auto",
        description="How tool calls are told from content: a parser's name, auto (from the chat "
        "template) or none.",
    )

    @property
    def name(self) -> str:
        """The canonical served name."""
        return self.served_model_name[0] if self.served_model_name else self.model

    @property
    def stated_len(self) -> int | None:
        """`max_model_len` where it is a number; None: the checkpoint has the last word."""
        return None if self.max_model_len == "auto" else self.max_model_len

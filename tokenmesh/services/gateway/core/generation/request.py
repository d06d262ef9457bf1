"""GenerationRequest: a validated request, ready to run; the same for every API.

It holds a PromptJob for each prompt. Prompt is a job's prompt after tokenization.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec

from tokenmesh.services.gateway.core.generation.choice import Choice, TextOptions
from tokenmesh.services.gateway.core.generation.parsing import ModelText, Parsing, ReasoningBudget
from tokenmesh.services.gateway.core.tenancy.tenant import DEFAULT_TENANT, Tenant
from tokenmesh.services.gateway.parsers.parser import Parser
from tokenmesh.shared.errors import FieldPath, InvalidInput, TokenMeshError, field_name
from tokenmesh.shared.ids import RequestId, WorkerId
from tokenmesh.shared.messages.beat import ModelCard
from tokenmesh.shared.messages.media import MediaItem
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.messages.tokenize import (
    ChatPrompt,
    FieldWarning,
    IdsPrompt,
    TextPrompt,
    Tokenized,
)
from tokenmesh.shared.text.detokenizer import CONTEXT_TOKENS
from tokenmesh.shared.tokens import BYTES_PER_ID, unpack_ids

RenameError = Callable[[TokenMeshError], TokenMeshError]
EMPTY_PROMPT: Final = "Either prompt or prompt_embeds must be provided and non-empty."
"""vLLM's text, which clients look for."""


@dataclass(frozen=True, slots=True)
class Head:
    """The identity of a response, repeated in each of its chunks."""

    id: str
    created: int
    """Unix seconds."""
    model: str
    service_tier: str | None = None
    """Only in responses to requests with a tier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkOptions:
    """It holds what the chunks of a response hold besides text."""

    logprobs: bool = False
    token_ids: bool = False
    usage: bool = False
    """A last chunk with the usage."""
    running_usage: bool = False
    """The usage so far in every chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamOptions:
    """It says how a beam search runs."""

    width: int
    """Beams that are kept, and choices that are returned."""
    length_penalty: float = 1.0
    end_ids: frozenset[int] = frozenset()
    """Tokens that end a choice and are not reported as its stop reason."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end a choice and are reported as its stop reason."""

    @property
    def num_candidates(self) -> int:
        """Tokens that are considered after each beam."""
        return 2 * self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptJob:
    """One prompt of a request, with everything that the mesh needs to generate its choices."""

    request_id: RequestId
    card: ModelCard
    prompt: TextPrompt | IdsPrompt | ChatPrompt
    sampling: SamplingParams
    """`max_tokens` is not used; `seed` belongs to the first choice."""
    max_tokens: int | None
    """None: as many as the context has room for."""
    cuts_max_tokens: bool = False
    """It tells whether a `max_tokens` over the context's room is cut instead of refused."""
    n: int = 1
    first_choice: int = 0
    """Index of this prompt's first choice in the response."""
    delivered: tuple[int, ...] = ()
    """Output that the client already has; the only choice continues after it."""
    bad_words: tuple[str, ...] = ()
    truncate_prompt_tokens: int | None = None
    """At least 1; None: no truncation."""
    truncation_side: Literal["left", "right"] = "left"
    returns_offsets: bool = False
    """As in Tokenize."""
    cache_salt: str | None = None
    priority: int = 0
    """Within its tenant; smaller runs sooner."""
    tenant: Tenant = DEFAULT_TENANT
    path: FieldPath = ()
    """Path of the prompt in the client's body if there are several."""
    parsing: Parsing | None = None
    """It says how the output is parsed; None: all of it is content."""
    budget: ReasoningBudget | None = None
    """Limit of reasoning tokens; None: no limit."""
    tokenized: Tokenized | None = None
    """The tokenizer's answer if the client has sent token ids; None: a tokenizer is called."""
    beams: BeamOptions | None = None
    """Set for a beam search; its width is `n`."""
    deadline_s: float
    """Absolute, wall clock."""
    keep_alive_s: float | None = None
    """It says how long a model on demand stays awake afterwards; negative: for ever; None: as
    before."""
    on_prepared: Callable[[], None] | None = None
    """Called when all text of the request is tokenized."""

    def sampling_after(self, packed_ids: bytes) -> SamplingParams:
        """`sampling` completed with where reasoning stands at the end of the tokenized prompt."""
        structured, thinking = self.sampling.structured, self.sampling.thinking
        if structured is not None and self.parsing is not None:
            after = self.parsing.reasoning_ends(packed_ids)
            structured = msgspec.structs.replace(structured, after=after)
        if self.budget is not None:
            thinking = self.budget.rule(packed_ids)
        if structured is self.sampling.structured and thinking is self.sampling.thinking:
            return self.sampling
        return msgspec.structs.replace(self.sampling, structured=structured, thinking=thinking)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A tokenized prompt, as workers get it."""

    packed_ids: bytes
    num_tokens: int
    max_tokens: int
    """Most output tokens, resolved."""
    route_hashes: bytes = b""
    route_head: bytes = b""
    media: tuple[MediaItem, ...] = ()
    media_tokens: Mapping[str, int] = field(default_factory=dict)
    """Tokens that stand for media, by modality; also known where `media` has been dropped."""
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    worker_id: WorkerId | None = None
    """The worker of the first placement."""
    warnings: tuple[FieldWarning, ...] = ()
    """About fields that are used otherwise than they were sent."""
    offsets: bytes | None = None
    """As in Tokenized."""
    prediction_ids: bytes = b""
    """As in Generate."""

    def warning_texts(self, path: FieldPath, rename: RenameError | None) -> list[str]:
        """Its warnings, which name fields of the client's body; `path` is the prompt's there."""
        texts = []
        for each in self.warnings:
            named: TokenMeshError = InvalidInput(
                f"{field_name(each.path)} {each.problem}", param="messages", path=each.path
            ).within(path)
            texts.append((rename(named) if rename is not None else named).message)
        return texts


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """It holds what to generate and how to show it."""

    head: Head
    jobs: tuple[PromptJob, ...]
    text: ModelText
    options: TextOptions
    chunks: ChunkOptions
    is_stream: bool
    shows_tokens_as_ids: bool = False
    role: str = "assistant"
    """Role of a chat's message."""
    echo: str = ""
    """Text that a chat's message begins with."""
    echoes_prompt: bool = False
    """It tells whether a text completion begins with its prompt."""
    shows_prompt_logprobs: bool = False
    shows_prompt_text: bool = False
    names_tool: bool = False
    """It tells whether the client named the function that a chat must call."""

    @property
    def num_choices(self) -> int:
        """Choices of all prompts."""
        return sum(job.n for job in self.jobs)

    def make_choices(self, job: PromptJob, prompt: Prompt) -> list[Choice]:
        """The choices of one prompt."""
        context = unpack_ids(prompt.packed_ids[-CONTEXT_TOKENS * BYTES_PER_ID :])
        parsers: list[Parser | None] = [None] * job.n
        if job.parsing is not None:
            parsers = job.parsing.make_parsers(prompt.packed_ids, job.n)
        return [
            Choice(job.first_choice + index, self.text.vocabulary, self.options, context, parser)
            for index, parser in enumerate(parsers)
        ]

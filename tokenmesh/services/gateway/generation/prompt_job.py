"""PromptJob: one prompt of a request and what the mesh must know of it, in no API's names."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from tokenmesh.services.gateway.extras.beam_search import BeamOptions
from tokenmesh.services.gateway.generation.parsing import Parsing
from tokenmesh.services.gateway.generation.reasoning_budget import ReasoningBudget
from tokenmesh.services.gateway.tenancy.tenant import DEFAULT_TENANT, Tenant
from tokenmesh.shared.errors import FieldPath
from tokenmesh.shared.ids import RequestId, WorkerId
from tokenmesh.shared.messages.beat import ModelCard
from tokenmesh.shared.messages.media import MediaItem
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.messages.tokenize import ChatPrompt, IdsPrompt, TextPrompt, Tokenized

EMPTY_PROMPT: Final = "Either prompt or prompt_embeds must be provided and non-empty."
"""vLLM's words, which clients look for."""


def _nothing() -> None:
    """Nobody waits for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptJob:
    """What a client asked for, validated."""

    request_id: RequestId
    card: ModelCard
    prompt: TextPrompt | IdsPrompt | ChatPrompt
    sampling: SamplingParams
    """`max_tokens` is meaningless here, `seed` is that of the first choice."""
    max_tokens: int | None
    """None: as many as there is room for."""
    cuts_max_tokens: bool = False
    """Whether more `max_tokens` than there is room for are cut instead of refused."""
    n: int = 1
    first_choice: int = 0
    """Index of this prompt's first choice in the response."""
    delivered: tuple[int, ...] = ()
    """Output that the client has: the only choice goes on after it."""
    bad_words: tuple[str, ...] = ()
    truncate_prompt_tokens: int | None = None
    """At least 1; None: it is not cut."""
    truncation_side: Literal["left", "right"] = "left"
    cache_salt: str | None = None
    priority: int = 0
    """Among its tenant's own; smaller is sooner."""
    tenant: Tenant = DEFAULT_TENANT
    path: FieldPath = ()
    """The prompt's path in the client's body, where there are several."""
    embeds: MediaItem | None = None
    """What takes the place of all of the prompt's tokens."""
    parsing: Parsing | None = None
    """How the answers are read; None: as plain text."""
    budget: ReasoningBudget | None = None
    """How long the answers may reason; None: without limit."""
    tokenized: Tokenized | None = None
    """What a tokenizer would answer, where the client has sent the ids; None: one is asked."""
    beams: BeamOptions | None = None
    """The answers are those of a beam search; its width is `n`."""
    deadline_s: float
    """Absolute, wall clock."""
    on_prepared: Callable[[], None] = _nothing
    """Called when no text of the request has to be tokenized any more."""

    def sampling_after(self, packed_ids: bytes) -> SamplingParams:
        """`sampling` with what depends on the tokenized prompt: where reasoning stands in it."""
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
    """A job's prompt as workers take it."""

    packed_ids: bytes
    num_tokens: int
    max_tokens: int
    """Output tokens at most, worked out."""
    route_hashes: bytes = b""
    route_head: bytes = b""
    media: tuple[MediaItem, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    worker_id: WorkerId | None = None
    """Where it was placed first."""

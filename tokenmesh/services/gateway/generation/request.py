"""GenerationRequest: a validated request, ready to run; the same for every API."""

from dataclasses import dataclass

from tokenmesh.services.gateway.generation.choice import Choice, TextOptions
from tokenmesh.services.gateway.generation.prompt_job import Prompt, PromptJob
from tokenmesh.services.gateway.mesh.vocabularies import ModelText
from tokenmesh.services.gateway.openai.chunk_stream import ChunkOptions
from tokenmesh.services.gateway.openai.head import Head
from tokenmesh.services.gateway.openai.logprobs import LogprobShapes
from tokenmesh.services.gateway.parsers.parser import Parser
from tokenmesh.shared.text.detokenizer import CONTEXT_TOKENS
from tokenmesh.shared.tokens import BYTES_PER_ID, unpack_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What to run and how to show it."""

    head: Head
    jobs: tuple[PromptJob, ...]
    text: ModelText
    options: TextOptions
    chunks: ChunkOptions
    is_stream: bool
    shows_tokens_as_ids: bool = False
    role: str = "assistant"
    """Of a chat's answer."""
    echo: str = ""
    """Text that a chat's answer begins with."""
    echoes_prompt: bool = False
    """Whether a plain completion begins with its prompt."""
    shows_prompt_logprobs: bool = False
    shows_prompt_text: bool = False
    names_tool: bool = False
    """The client has named the function that a chat has to call."""

    @property
    def num_choices(self) -> int:
        """Of all prompts."""
        return sum(job.n for job in self.jobs)

    @property
    def logprobs(self) -> LogprobShapes:
        """How log-probabilities are shown."""
        return LogprobShapes(
            self.text.vocabulary,
            self.shows_tokens_as_ids,
            has_named=bool(self.jobs[0].sampling.logprob_token_ids),
        )

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

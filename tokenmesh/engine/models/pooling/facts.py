"""PoolingFacts: what the worker must know of a model that pools, before its weights are read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from tokenmesh.engine.api.pooling import PoolingParams, PoolTask
from tokenmesh.engine.models.pooling.instruction import InstructionRule
from tokenmesh.shared.errors import InvalidInput

EMBEDDINGS: Final = frozenset({"embed", "token_embed"})
"""Tasks whose answers are vectors; the others' are one number for each label."""
PER_TOKEN: Final = frozenset({"token_embed", "token_classify"})
"""Tasks that answer with numbers for each token."""


@dataclass(frozen=True, slots=True)
class PoolingFacts:
    """It holds what a model answers, and from which prompts."""

    tasks: tuple[PoolTask, ...]
    size: int
    """Width of an embedding, or the number of labels."""
    labels: tuple[str, ...] = ()
    """Names of the labels, in their order."""
    is_causal: bool = False
    """False: each token depends on all others, so that a prompt is computed in one step."""
    num_types: int = 1
    """Kinds of tokens: 2 where the texts of a pair differ in `PoolItem.type_ids`."""
    dimensions: tuple[int, ...] = ()
    """Sizes that an embedding was trained to be cut to."""
    any_dimension: bool = False
    """It tells whether it was trained to be cut anywhere."""
    pooling_type: str | None = None
    """It holds what an embedding is made of, by a name of vLLM's; None: what the checkpoint
    says."""
    activates: bool | None = None
    """It holds what holds for requests that leave use_activation out; None: what the checkpoint
    says."""
    in_chunks: bool = False
    """`ModelCard.embeds_in_chunks`."""
    max_embed_len: int = 0
    """`ModelCard.max_embed_len`."""
    instruction: InstructionRule | None = None
    """It says how the tokens are found that a mean leaves out; None: it takes all."""
    reads_all: bool = True
    """It tells whether a prompt's answer needs more than the state of its last token."""
    labels_tokens: bool = False
    """It tells whether the classifier was made for tokens; else it may still be put to each of
    them."""
    padding_id: int | None = None
    """This is the id of padding of a decoder's classifier, which reads the last token that is not
    this one."""

    def read_of(self, params: PoolingParams, prompt_ids: list[int]) -> list[int]:
        """A prompt up to the last token that its answer depends on."""
        end = len(prompt_ids)
        if params.task in PER_TOKEN:
            return prompt_ids
        while end > 1 and prompt_ids[end - 1] == self.padding_id:
            end -= 1
        return prompt_ids[:end]

    def reads_all_for(self, params: PoolingParams) -> bool:
        """Return whether the answer needs the state of every token."""
        return self.reads_all or params.task in PER_TOKEN

    def num_left_out(self, params: PoolingParams, prompt_ids: Sequence[int]) -> int:
        """Tokens at a prompt's beginning that its embedding leaves out. Raises InvalidInput."""
        if self.instruction is None or params.task != "embed":
            return 0
        return self.instruction.length(prompt_ids)

    def completed(self, params: PoolingParams) -> PoolingParams:
        """Return what a request asks for, with the settings' default for what it leaves out."""
        if params.use_activation is not None or self.activates is None:
            return params
        return msgspec.structs.replace(params, use_activation=self.activates)

    def check(self, params: PoolingParams) -> None:
        """Raise InvalidInput where the model does not do what is wanted."""
        if params.task not in self.tasks:
            known = ", ".join(self.tasks)
            raise InvalidInput(f"this model does not {params.task}; it does: {known}", param="task")
        wanted = params.dimensions
        if wanted is None:
            return
        if params.task not in EMBEDDINGS:
            raise InvalidInput(f"{params.task} has no dimensions", param="dimensions")
        if not 1 <= wanted <= self.size:
            raise InvalidInput(
                f"dimensions is {wanted}, not in [1, {self.size}]", param="dimensions"
            )
        if wanted == self.size or self.any_dimension or wanted in self.dimensions:
            return
        if self.dimensions:
            sizes = ", ".join(map(str, self.dimensions))
            problem = f"dimensions is {wanted}; this model was trained for {sizes}"
        else:
            problem = (
                f"dimensions is {wanted}; this model was trained for its {self.size} dimensions "
                "only"
            )
        raise InvalidInput(problem, param="dimensions")

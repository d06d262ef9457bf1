"""ReasoningBudget: how many tokens an answer may reason for, and how many its prompt has spent."""

from dataclasses import dataclass

from tokenmesh.services.gateway.generation.parsing import Parsing
from tokenmesh.shared.messages.sampling import ThinkingBudget


@dataclass(frozen=True, slots=True)
class ReasoningBudget:
    """Of one request to a model whose reasoning has an end marker."""

    num_tokens: int
    parsing: Parsing

    def rule(self, packed_ids: bytes) -> ThinkingBudget:
        """The worker's rule for answers to a tokenized prompt."""
        spent = self.parsing.reasoning_spent(packed_ids)
        start, ends = self.parsing.reasoning_markers()
        return ThinkingBudget(
            num_tokens=self.num_tokens,
            is_open=spent is not None,
            num_spent=spent or 0,
            start_ids=start,
            end_ids=ends[0],
            other_ends=ends[1:],
        )

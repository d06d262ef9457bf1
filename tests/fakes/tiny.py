"""TinyCheckpoint: a checkpoint on disk with transformers as its oracle."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class TinyCheckpoint:
    """A checkpoint on disk and its oracle."""

    directory: Path
    make_oracle: Callable[[], Any]
    """A fresh transformers model: dynamic rope keeps state from call to call."""
    _known: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def greedy(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """What transformers generates after each prompt."""
        outputs = []
        for prompt in prompts:
            known = self._known.get((num_tokens, *prompt))
            if known is not None:
                outputs.append(known)
                continue
            ids = self.make_oracle().generate(
                torch.tensor([prompt]),
                max_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            outputs.append(ids[0, len(prompt) :].tolist())
            self._known[(num_tokens, *prompt)] = outputs[-1]
        return outputs

    def logits(self, prompt: list[int]) -> torch.Tensor:
        """transformers' logits [len(prompt), vocab]."""
        with torch.no_grad():
            return self.make_oracle()(torch.tensor([prompt])).logits[0]  # type: ignore[no-any-return]


Tiny = Callable[[str], TinyCheckpoint]
"""Gets a checkpoint by its name in tests.fakes.models.FAKES."""


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random token ids that every fake's vocabulary holds."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 100, (length,), generator=generator).tolist()

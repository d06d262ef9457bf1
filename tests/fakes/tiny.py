"""TinyCheckpoint: a checkpoint on disk with transformers as its oracle."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

_BY_LENGTH = ('"rope_type": "dynamic"', '"rope_type": "longrope"')
"""Ropes that turn earlier tokens anew as a sequence grows."""


@dataclass(frozen=True)
class TinyCheckpoint:
    """A checkpoint on disk and its oracle."""

    directory: Path
    make_oracle: Callable[[], Any]
    """A fresh transformers model."""
    _known: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def greedy(
        self,
        prompts: Sequence[Sequence[int]],
        num_tokens: int,
        likely: Sequence[Sequence[int]] | None = None,
    ) -> list[list[int]]:
        """The tokens that transformers generates after each prompt.

        likely: for each prompt, tokens that may be the answer. One pass of transformers shows
        whether they are, where generating takes a pass a token.
        """
        outputs = []
        for number, prompt in enumerate(prompts):
            key = (num_tokens, *prompt)
            if key not in self._known:
                tokens = None if likely is None else list(likely[number])
                is_right = tokens is not None and self._is_answer(prompt, tokens, num_tokens)
                self._known[key] = (
                    tokens if tokens and is_right else self._generate(prompt, num_tokens)
                )
            outputs.append(self._known[key])
        return outputs

    def logits(self, prompt: Sequence[int]) -> torch.Tensor:
        """transformers' logits [len(prompt), vocab]."""
        oracle = self.make_oracle() if self._is_by_length else self._oracle
        with torch.no_grad():
            return oracle(torch.tensor([list(prompt)])).logits[0]  # type: ignore[no-any-return]

    @cached_property
    def _oracle(self) -> Any:
        return self.make_oracle()

    @cached_property
    def _is_by_length(self) -> bool:
        """True where the oracle's state and its keys of earlier tokens depend on the length."""
        config = (self.directory / "config.json").read_text()
        return any(each in config for each in _BY_LENGTH)

    def _is_answer(self, prompt: Sequence[int], tokens: Sequence[int], num_tokens: int) -> bool:
        """Return whether each token is transformers' choice after those before it."""
        if self._is_by_length or len(tokens) != num_tokens:
            return False
        logits = self.logits([*prompt, *tokens[:-1]])[len(prompt) - 1 :]
        return logits.argmax(-1).tolist() == list(tokens)

    def _generate(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        ids = self.make_oracle().generate(
            torch.tensor([list(prompt)]),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return ids[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


Tiny = Callable[[str], TinyCheckpoint]
"""Gets a checkpoint by its name in tests.fakes.models.FAKES."""


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random token ids that every fake's vocabulary holds."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 100, (length,), generator=generator).tolist()

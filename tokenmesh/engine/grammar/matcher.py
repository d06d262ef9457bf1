"""The interface of grammars: compile, fill, accept, rollback, is_terminated.

A backend compiles in a child process, where it may take for ever, and loads the outcome in the
worker. A grammar is shared by all streams that use it; each stream has its own matcher.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tokenmesh.engine.api.structured import Structured
from tokenmesh.shared.errors import TokenMeshError

Masks = NDArray[np.int32]
"""[positions, ceil(vocab / 32)]; bit i of word w stands for token 32 * w + i; 1: allowed."""


class CannotCompile(TokenMeshError):
    """The backend does not support the constraint, or it is invalid; the message says why."""


class GrammarFailed(TokenMeshError):
    """A matcher cannot continue: its grammar is too ambiguous to follow."""


class Matcher(Protocol):
    """One stream's position in its grammar."""

    def fill(self, masks: Masks, index: int) -> None:
        """Write the allowed tokens to masks[index]. Raises GrammarFailed."""

    def accept(self, token_id: int) -> bool:
        """Accept a token; False, and nothing has changed, when it is not allowed next.

        Raises GrammarFailed.
        """

    def rollback(self, num_tokens: int) -> None:
        """Take back the last `num_tokens` accepted tokens."""

    def is_terminated(self) -> bool:
        """Return whether an end-of-sequence token was accepted: nothing may follow."""


class Grammar(Protocol):
    """A compiled grammar; immutable."""

    @property
    def num_bytes(self) -> int:
        """Approximate memory of the grammar."""

    def start(self) -> Matcher: ...


class Backend(Protocol):
    """A library of grammars for one tokenizer."""

    def compile(self, structured: Structured) -> bytes:
        """In a child: a grammar that `load` takes. Raises CannotCompile."""

    def load(self, data: bytes) -> Grammar:
        """In the worker; takes milliseconds."""


def num_words(vocab_size: int) -> int:
    """Words of a mask."""
    return -(-vocab_size // 32)

"""GritLM: a decoder whose tokens see each other when it embeds; its mean leaves instructions out.

A prompt is `<|user|>`, an instruction, `<|embed|>` and the text, each on its own line; without
an instruction `<|embed|>` and the text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tokenmesh.engine.models.raw_config import RawConfig
from tokenmesh.shared.errors import CheckpointError, InvalidInput

GRITLM: Final = "GritLM"
"""The architecture that checkpoints without code of their own state."""
_CODE: Final = "modeling_gritlm7b."
_USER: Final = "<|user|>\n"
_EMBED: Final = "<|embed|>\n"


def is_gritlm(raw: RawConfig) -> bool:
    """Return whether config.json describes a GritLM of Mistral's shape; others are refused by
    name.
    """
    names, code = raw.get("architectures"), raw.part("auto_map")
    body = "" if code is None else str(code.values.get("AutoModel", ""))
    if names != [GRITLM] and not body.startswith(_CODE):
        return False
    if raw.get("model_type") != "mistral":
        problem = f"is {raw.get('model_type')!r}; GritLM is supported as mistral only"
        raise raw.error("model_type", problem)
    return True


@dataclass(frozen=True, slots=True)
class InstructionRule:
    """It says how an instruction is found among the ids of a prompt."""

    special: tuple[int, ...]
    """It holds what the tokenizer puts before a text."""
    user: tuple[int, ...]
    """It holds what an instruction begins with."""
    embed: tuple[int, ...]
    """It holds what a prompt without an instruction begins with."""
    end: tuple[int, ...]
    """It holds what an instruction ends with, on its own line."""

    def length(self, ids: Sequence[int]) -> int:
        """Tokens that the mean leaves out; 0 where the prompt has neither mark.

        Raises InvalidInput for an instruction that does not end, or has no text behind it.
        """
        given = tuple(ids)
        start = len(self.special) if given[: len(self.special)] == self.special else 0
        length = 0
        if given[start : start + len(self.user)] == self.user:
            found = _find(given, self.end, start)
            if found is None:
                raise InvalidInput("its instruction does not end with a line <|embed|>")
            length = found + len(self.end)
        elif given[start : start + len(self.embed)] == self.embed:
            length = start + len(self.embed)
        if length == len(given):
            raise InvalidInput("it holds no text behind <|embed|>")
        return length


def _find(ids: tuple[int, ...], wanted: tuple[int, ...], start: int) -> int | None:
    places = range(start, len(ids) - len(wanted) + 1)
    return next((at for at in places if ids[at : at + len(wanted)] == wanted), None)


def read_rule(directory: Path) -> InstructionRule:
    """By the tokenizer of the checkpoint. Raises CheckpointError."""
    from tokenizers import Tokenizer  # a worker of another model does without it

    path = directory / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing more special
        raise CheckpointError(f"{path}: cannot be read ({error})") from error

    def plain(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

    text = "a"
    alone, whole = plain(text), tuple(tokenizer.encode(text).ids)
    before = plain(f"{text}\n{_EMBED}")
    if whole[len(whole) - len(alone) :] != alone or before[: len(alone)] != alone:
        raise CheckpointError(f"{path}: does not keep an instruction apart from its text")
    special = whole[: len(whole) - len(alone)]
    return InstructionRule(special, plain(_USER), plain(_EMBED), before[len(alone) :])

"""Cuts text into words before pairs are merged, as `tokenizer.ggml.pre` says.

Expressions are those of the models' own tokenizer.json, which llama.cpp names by what it knows them
from.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    cuts: tuple[str, ...]
    """One after the other; what matches is a word, and so is what lies between."""
    takes_whole_words: bool = False
    """A word that is a token is taken as it is, whatever merges would make of it."""
    begins: bool = False
    """Text begins with a token, where the file does not say."""
    composes: bool = False
    """Text is normalized to NFC."""


_SHORT: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_REST: Final = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_FIRST: Final = r"[^\r\n\p{L}\p{N}]?"
_CASED: Final = (f"{_FIRST}{_UPPER}*{_LOWER}+", f"{_FIRST}{_UPPER}+{_LOWER}*")
"""Words that end before a capital."""
_SLASHES: Final = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_SIGNS: Final = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_MARKED: Final = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"

_EAST_ASIAN: Final = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"

_LLAMA3: Final = PreTokenizer((rf"{_SHORT}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}",))
_QWEN2: Final = PreTokenizer((rf"{_SHORT}|{_LETTERS}|\p{{N}}|{_REST}",))
_DIGITS: Final = PreTokenizer((r"\p{N}", _GPT2))
_PLAIN: Final = PreTokenizer((_GPT2,))
_O200K: Final = PreTokenizer(
    (rf"{_CASED[0]}{_SHORT}?|{_CASED[1]}{_SHORT}?|\p{{N}}{{1,3}}|{_SLASHES}",)
)
_OF_LLAMA: Final = replace(_LLAMA3, takes_whole_words=True, begins=True)

PRE_TOKENIZERS: Final[Mapping[str, PreTokenizer]] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1"), _OF_LLAMA),
    **dict.fromkeys(("pixtral", "midm-2.0", "lfm2"), _OF_LLAMA),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _LLAMA3),
    "glm4": replace(_LLAMA3, takes_whole_words=True),
    "qwen2": replace(_QWEN2, composes=True),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez"), _QWEN2),
    "qwen35": PreTokenizer(
        (
            rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
        ),
        composes=True,
    ),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "exaone4", "trillion", "gigachat"), _PLAIN),
    **dict.fromkeys(
        ("starcoder", "refact", "smollm", "codeshell", "exaone", "minerva-7b"), _DIGITS
    ),
    "command-r": replace(_DIGITS, composes=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _O200K),
    "tekken": PreTokenizer(
        (rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_SLASHES}",), takes_whole_words=True, begins=True
    ),
    "deepseek-coder": PreTokenizer(
        (
            r"[\r\n]",
            r"\s?\p{L}+",
            r"\s?\p{P}+",
            "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
            r"\p{N}",
        )
    ),
    **dict.fromkeys(
        ("deepseek-v3", "hunyuan-dense"),
        PreTokenizer((r"\p{N}{1,3}", _EAST_ASIAN, f"{_SIGNS}|{_MARKED}|{_SPACES}")),
    ),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "seed-coder": PreTokenizer(
        (rf"{_SHORT}|{_LETTERS}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)
    ),
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}

"""Fill in the middle: `suffix`, for models whose vocabulary has markers for it."""

from typing import Final, NamedTuple

from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.text import Vocabulary


class SuffixMarkers(NamedTuple):
    """Markers before the prompt, before the suffix, and before the text to be generated."""

    prefix: str
    suffix: str
    middle: str


FORMATS: Final = (
    # Qwen coder, CodeGemma
    SuffixMarkers("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    # StarCoder, Granite code, StableCode
    SuffixMarkers("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    # SantaCoder
    SuffixMarkers("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    # DeepSeek coder
    SuffixMarkers(
        "<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"
    ),
    # Code Llama
    SuffixMarkers("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),
    # CodeGeeX, GLM-4
    SuffixMarkers("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
)


def fill_in_prompt(prompt: str | list[int], suffix: str, vocabulary: Vocabulary) -> str | list[int]:
    """The prompt with markers and suffix. Raises InvalidInput for a model without markers."""
    markers = _markers_of(vocabulary)
    if markers is None:
        raise InvalidInput(
            "suffix: the model's vocabulary has no markers for filling in the middle",
            param="suffix",
        )
    if isinstance(prompt, str):
        return f"{markers.prefix}{prompt}{markers.suffix}{suffix}{markers.middle}"
    before, between, after = (vocabulary.added_id(marker) for marker in markers)
    assert before is not None
    assert between is not None
    assert after is not None
    return [before, *prompt, between, *vocabulary.encode(suffix), after]


def _markers_of(vocabulary: Vocabulary) -> SuffixMarkers | None:
    for markers in FORMATS:
        if all(vocabulary.added_id(marker) is not None for marker in markers):
            return markers
    return None

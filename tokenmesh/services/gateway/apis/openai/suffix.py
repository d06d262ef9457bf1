"""Suffix: what follows the text that a completion fills in, in the format of one model."""

from dataclasses import dataclass
from typing import Final, NamedTuple

from tokenmesh.services.gateway.apis.openai.request import CompletionRequest
from tokenmesh.services.gateway.apis.openai.request_builder import RequestBuilder
from tokenmesh.services.gateway.core.context import RequestContext
from tokenmesh.services.gateway.core.generation.parsing import ModelText
from tokenmesh.shared.config.http import BodySettings
from tokenmesh.shared.errors import InvalidInput, PayloadTooLarge
from tokenmesh.shared.messages.beat import ModelCard
from tokenmesh.shared.text import Vocabulary
from tokenmesh.shared.tokens import count_ids, pack_ids


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


@dataclass(frozen=True, slots=True)
class Suffix:
    """It holds what follows the text to be generated, in the format of one model."""

    text: str
    markers: SuffixMarkers
    marker_ids: tuple[int, int, int]
    end: bytes
    """Its ids and the last marker's, packed once for all prompts that are given as ids."""

    def around(self, prompt: str) -> str:
        """The prompt with markers and suffix."""
        markers = self.markers
        return f"{markers.prefix}{prompt}{markers.suffix}{self.text}{markers.middle}"

    def around_ids(self, prompt: list[int]) -> bytes:
        """The packed ids around a prompt of ids."""
        before, between, _ = self.marker_ids
        return pack_ids([before, *prompt, between]) + self.end

    @property
    def num_ids(self) -> int:
        """Return how many it adds to a prompt that is given as ids."""
        return 2 + count_ids(self.end)


def find_markers(vocabulary: Vocabulary) -> tuple[SuffixMarkers, tuple[int, int, int]]:
    """The model's markers and their ids. Raises InvalidInput for a model without them."""
    for markers in FORMATS:
        match [vocabulary.added_id(marker) for marker in markers]:
            case [int() as before, int() as between, int() as after]:
                return markers, (before, between, after)
    raise InvalidInput(
        "suffix: the model's vocabulary has no markers for filling in the middle",
        param="suffix",
    )


async def read_suffix(
    builder: RequestBuilder,
    body: CompletionRequest,
    card: ModelCard,
    context: RequestContext,
    text: ModelText,
) -> Suffix | None:
    """A tokenizer encodes it, once for all prompts. Raises InvalidInput and as its calls do."""
    if not body.suffix:
        return None
    markers, marker_ids = find_markers(text.vocabulary)
    check_copies(body, len(body.suffix), str, builder.settings)
    ids: list[int] = []
    if not all(isinstance(prompt, str) for prompt in body.prompts):
        ids = await builder.encode("suffix", body.suffix, card, context)
        check_copies(body, len(ids), list, builder.settings)
    return Suffix(body.suffix, markers, marker_ids, pack_ids([*ids, marker_ids[2]]))


def check_copies(body: CompletionRequest, length: int, kind: type, limits: BodySettings) -> None:
    """Raises PayloadTooLarge where the suffix of that length, which each prompt of a kind holds a
    copy of, makes the prompts larger than a body may be."""
    name, what = ("max_body_bytes", "characters") if kind is str else ("max_json_ids", "token ids")
    total = sum(len(prompt) + length for prompt in body.prompts if isinstance(prompt, kind))
    if total > (most := getattr(limits, name)):
        raise PayloadTooLarge(
            f"with the suffix in each of them the prompts hold {total} {what}, at most {most} "
            f"(gateway.{name})",
            param="suffix",
        )

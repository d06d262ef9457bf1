"""RetrievalPrompts: what ColQwen2's processor makes of a text, and of an image, that is embedded.

transformers' processor imports torch, and takes texts or images; so its two forms of a prompt are
written here, the second one as a chat template, by which media are placed.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tokenmesh.shared.errors import CheckpointError

COLQWEN2: Final = "colqwen2"
"""The model_type in config.json."""
_QUERY_PREFIX: Final = "Query: "
_VISUAL_PROMPT: Final = (
    "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image.<|im_end|>"
    "<|endoftext|>"
)
_AUGMENTATIONS: Final = 10
"""Padding tokens behind a text, whose embeddings stand for further words."""
_ONE_PART: Final = (
    "this model embeds one text or one image at a time: send one message with one part"
)
_TEMPLATE: Final = """\
{%- if messages|length != 1 or messages[0]['content']|length != 1 -%}
{{- raise_exception(ONE_PART) -}}
{%- endif -%}
{%- for part in messages[0]['content'] -%}
{%- if part['type'] == 'image' -%}
{{- VISUAL -}}
{%- else -%}
{{- BEFORE + part['text'] + BEHIND -}}
{%- endif -%}
{%- endfor -%}
"""


@dataclass(frozen=True, slots=True)
class RetrievalPrompts:
    """The prompts of one checkpoint."""

    around_text: tuple[str, str]
    """Texts that stand before and behind a text."""
    visual: str
    """The prompt of an image, with its placeholder."""

    @property
    def template(self) -> str:
        """A chat template for one message that holds one text or one image."""
        before, behind = self.around_text
        texts = {"ONE_PART": _ONE_PART, "VISUAL": self.visual, "BEFORE": before, "BEHIND": behind}
        template = _TEMPLATE
        for name, text in texts.items():
            template = template.replace(name, json.dumps(text))
        return template


def read_retrieval(directory: Path, pad_token: str) -> RetrievalPrompts:
    """By processor_config.json, else as transformers' class has them. Raises CheckpointError."""
    path = directory / "processor_config.json"
    try:
        stated = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    before = stated.get("query_prefix") or _QUERY_PREFIX
    visual = stated.get("visual_prompt_prefix") or _VISUAL_PROMPT
    if not isinstance(before, str) or not isinstance(visual, str):
        raise CheckpointError(f"{path}: query_prefix and visual_prompt_prefix must be strings")
    return RetrievalPrompts((before, pad_token * _AUGMENTATIONS + "\n"), visual)

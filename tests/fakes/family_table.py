"""The table of families in docs/models.md, made from the checkpoints that the tests compare.

`python -m tests.fakes.family_table` writes it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from tests.fakes.general_models import GENERAL, HEADS, STATES
from tests.fakes.models import FAKES, Fake, classes, config_of
from tokenmesh.engine.models.keeps import Latent, LayerKeeps, Pages
from tokenmesh.engine.models.native.registry import FAMILIES
from tokenmesh.engine.models.raw_config import RawConfig
from tokenmesh.engine.models.tree.tree import adapt, length_ropes

PAGE: Final = Path(__file__).resolve().parents[2] / "docs/models.md"
BEGIN, END = "<!-- families: made by tests -->\n", "<!-- end of families -->\n"
_HEAD: Final = """| architecture | kinds | a layer keeps | logits differ by at most |
|---|---|---|---|
"""


def table() -> str:
    """One row for each architecture that the tests compare with transformers."""
    rows: dict[str, tuple[set[str], bool]] = {}
    for name, fake in [*FAKES.items(), *GENERAL.items()]:
        words, has_states = rows.get(fake.family, (set(), False))
        words |= kept_by(fake, HEADS if name in GENERAL else {})
        rows[fake.family] = (words, has_states or name in STATES)
    lines = []
    for family, (words, has_states) in sorted(rows.items(), key=lambda row: row[0].lower()):
        architecture = f"{family}ForCausalLM"
        kinds = "native, general" if architecture in FAMILIES else "general"
        tolerance = "1e-3" if has_states else "2e-4"
        kept = ", ".join(sorted(words))
        lines.append(f"| `{architecture}` | {kinds} | {kept} | {tolerance} |\n")
    return _HEAD + "".join(lines)


def kept_by(fake: Fake, more: Mapping[str, Any]) -> set[str]:
    """Return what the probe finds in a fake's layers, in the page's words."""
    _, model_class = classes(fake)
    with torch.device("meta"):
        model: Any = model_class._from_config(config_of(fake, more), attn_implementation="eager")
    config = RawConfig(model.config.to_dict(), fake.family)
    keeps = adapt(model.eval(), length_ropes(config, model.config, model)).probe()
    return {word for layer in keeps for word in _words(layer)}


def _words(layer: LayerKeeps) -> set[str]:
    words = set()
    for kept in layer:
        if isinstance(kept, Latent):
            words.add("latents" if kept.rope_dim else "index keys")
        elif isinstance(kept, Pages):
            words.add("keys and values" if kept.window is None else "keys and values in a window")
        else:
            words.add("a state")
    return words


def parts() -> tuple[str, str, str]:
    """The page before the table, the table, and what comes after it."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    written, after = rest.split(END)
    return before + BEGIN, written, END + after


if __name__ == "__main__":
    first, _, last = parts()
    PAGE.write_text(first + table() + last, encoding="utf-8")

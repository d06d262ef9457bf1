"""The demo model with a long context and markers of a suffix, for attacks by texts."""

import json
import shutil
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

import tokenmesh

_MARKERS: Final = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
_LENGTH: Final = 131_072


def long_model(folder: Path) -> Path:
    """Its folder, for the simulated engine: the weights are those of the demo model."""
    shutil.copytree(Path(tokenmesh.__file__).parent / "demo_model", folder)
    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.add_special_tokens(list(_MARKERS))
    tokenizer.save(path)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "max_position_embeddings": _LENGTH,
        "vocab_size": max(config["vocab_size"], tokenizer.get_vocab_size()),
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder

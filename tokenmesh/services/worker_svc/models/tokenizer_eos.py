"""The token that a tokenizer names as its end.

Models that were taught to chat often end a turn with it while config.json still names the end token
of the model that they were made from.
"""

from pathlib import Path
from typing import Any, Final

import msgspec

from tokenmesh.services.worker_svc.models.location import locate_tokenizer_files
from tokenmesh.services.worker_svc.models.raw_config import read_json
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.errors import CheckpointError

_NAMING: Final = ("tokenizer_config.json", "special_tokens_map.json")


class _Added(msgspec.Struct):
    id: int
    content: str


class _Tokenizer(msgspec.Struct):
    added_tokens: list[_Added] = []


def tokenizer_eos(model: ModelSettings) -> frozenset[int]:
    """Its id; none where no tokenizer is found or it names no end. Raises CheckpointError."""
    try:
        directory = locate_tokenizer_files(model)
    except CheckpointError:
        # The tokenizer service is the one to complain: a worker needs none.
        return frozenset()
    configs = [read_json(directory / name) for name in _NAMING if (directory / name).is_file()]
    for config in configs:
        name = _text(config.get("eos_token"))
        if name is not None:
            listed = config.get("added_tokens_decoder")
            return _ids_in(listed, name) or _ids_in_file(directory / "tokenizer.json", name)
    return frozenset()


def _text(token: Any) -> str | None:
    """Of a token that is written as text or as an object with its options."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def _ids_in(listed: Any, name: str) -> frozenset[int]:
    entries = listed.items() if isinstance(listed, dict) else ()
    return frozenset(int(key) for key, token in entries if key.isdigit() and _text(token) == name)


def _ids_in_file(path: Path, name: str) -> frozenset[int]:
    if not path.is_file():
        return frozenset()
    try:
        tokenizer = msgspec.json.decode(path.read_bytes(), type=_Tokenizer)
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    return frozenset(each.id for each in tokenizer.added_tokens if each.content == name)

"""Whether a tokenizer and a model belong together: its ids are rows of the embedding."""

import logging
from pathlib import Path
from typing import Any

import msgspec

from tokenmesh.services.worker_svc.models.location import locate_tokenizer
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.errors import CheckpointError

logger = logging.getLogger(__name__)


class _Added(msgspec.Struct):
    id: int
    content: str = ""


class _Model(msgspec.Struct, frozen=True):
    vocab: dict[str, int] | list[Any] = {}


class _Tokenizer(msgspec.Struct):
    model: _Model = _Model()
    added_tokens: list[_Added] = []


def check_tokenizer_ids(model: ModelSettings, vocab_size: int) -> None:
    """Raise CheckpointError where the vocabulary of tokenizer.json has ids past the embedding.

    Added tokens past it are logged: published checkpoints have some that no text model uses, and
    a request that holds one is refused. A worker needs no tokenizer, so none is no error.
    """
    try:
        path = locate_tokenizer(model)
    except CheckpointError:
        return
    tokenizer = _read(path)
    vocab = tokenizer.model.vocab
    added = {each.id: each.content for each in tokenizer.added_tokens}
    ids = range(len(vocab)) if isinstance(vocab, list) else vocab.values()
    largest = max((each for each in ids if each not in added), default=0)
    if largest >= vocab_size:
        raise CheckpointError(
            f"{path}: model.vocab has ids up to {largest}; the embedding of {model.model} has "
            f"{vocab_size} rows"
        )
    if past := sorted(each for each in added if each >= vocab_size):
        logger.warning(
            "%s: the embedding has %d rows, so requests with added tokens %s are refused",
            *(path, vocab_size, ", ".join(f"{added[each]} ({each})" for each in past[:5])),
        )


def _read(path: Path) -> _Tokenizer:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Tokenizer)
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error

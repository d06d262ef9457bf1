"""Token ids of a checkpoint: which ones end a stream, and whether the tokenizer's fit the model.

Chat models often end a turn with a token that only the tokenizer names, while config.json still
names the end token of the base model.
"""

import logging
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from tokenmesh.engine.models.location import locate_tokenizer, locate_tokenizer_files
from tokenmesh.engine.models.raw_config import (
    REFUSED_IN_GENERATION,
    RawConfig,
    read_json,
    refuse_keys,
)
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.errors import CheckpointError

logger = logging.getLogger(__name__)


class _Added(msgspec.Struct):
    id: int
    content: str = ""
    special: bool = False


class _Model(msgspec.Struct, frozen=True):
    vocab: dict[str, int] | list[Any] = {}


class _Extra(msgspec.Struct):
    """Read without the vocabulary, which takes 0.3 s where it has 262,144 entries."""

    added_tokens: list[_Added] = []


class _Tokenizer(_Extra):
    model: _Model = _Model()


_File = TypeVar("_File", bound=_Extra)


def check_tokenizer_ids(model: ModelSettings, raw: RawConfig, vocab_size: int) -> None:
    """Raise CheckpointError where tokenizer.json makes ids past the embedding out of text.

    Special tokens past it and those that config.json gives a purpose are logged: text models have
    some for images, and a request with one outside of its media is refused. A missing tokenizer is
    no error, as a worker works without one.
    """
    try:
        path = locate_tokenizer(model)
    except CheckpointError:
        return
    tokenizer = _read(path, _Tokenizer)
    added = {each.id: each for each in tokenizer.added_tokens}
    vocab = tokenizer.model.vocab
    ids = range(len(vocab)) if isinstance(vocab, list) else vocab.values()
    rows = f"the embedding of {model.model} has {vocab_size} rows"
    largest = max((each for each in ids if each not in added), default=0)
    if largest >= vocab_size:
        raise CheckpointError(f"{path}: model.vocab has ids up to {largest}; {rows}")
    placeholders = _placeholders(raw)
    past = [added[each] for each in sorted(added) if each >= vocab_size]
    made = [each for each in past if not each.special and each.id not in placeholders]
    if made:
        raise CheckpointError(f"{path}: added_tokens has {_listed(made)}; {rows}")
    if past:
        logger.warning("%s: %s, so requests with %s are refused", path, rows, _listed(past))


def vocabulary_problem(model: ModelSettings, draft: ModelSettings) -> str | None:
    """Return how the texts of two models' tokens differ; None: they do not, or one has no
    tokenizer.
    """
    try:
        files = locate_tokenizer(model), locate_tokenizer(draft)
    except CheckpointError:
        return None
    ours, theirs = (_texts(_read(file, _Tokenizer)) for file in files)
    wrong = next((each for each in ours if theirs.get(each, ours[each]) != ours[each]), None)
    if wrong is None:
        return None
    return (
        f"{draft.model} has another tokenizer than {model.model}: token {wrong} is "
        f"{theirs[wrong]!r} there and {ours[wrong]!r} here"
    )


def _texts(tokenizer: _Tokenizer) -> dict[int, str]:
    vocab = tokenizer.model.vocab
    if isinstance(vocab, list):
        # of a unigram model: pairs of a text and its score
        texts = {number: str(pair[0]) for number, pair in enumerate(vocab)}
    else:
        texts = {number: text for text, number in vocab.items()}
    return texts | {each.id: each.content for each in tokenizer.added_tokens}


def _placeholders(raw: RawConfig) -> set[int]:
    """Ids that config.json names, such as image_token_id."""
    endings = ("_token_id", "_token_index")
    return {
        value
        for key, value in raw.values.items()
        if key.endswith(endings) and isinstance(value, int)
    }


def _listed(tokens: list[_Added]) -> str:
    return ", ".join(f"{each.content} ({each.id})" for each in tokens[:5])


def _read(path: Path, kind: type[_File]) -> _File:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error


_NAMING: Final = ("tokenizer_config.json", "special_tokens_map.json")


def tokenizer_eos(model: ModelSettings) -> frozenset[int]:
    """Ids of the end token that the tokenizer names; empty without a tokenizer or such a name.

    Raises CheckpointError for a file that cannot be read.
    """
    try:
        directory = locate_tokenizer_files(model)
    except CheckpointError:
        # the tokenizer service reports it; a worker works without one
        return frozenset()
    configs = [read_json(directory / name) for name in _NAMING if (directory / name).is_file()]
    for config in configs:
        name = _text(config.get("eos_token"))
        if name is not None:
            listed = config.get("added_tokens_decoder")
            return _ids_in(listed, name) or _ids_in_file(directory / "tokenizer.json", name)
    return frozenset()


def _text(token: Any) -> str | None:
    """The text of a token, which is written as a string or as an object with options."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def _ids_in(listed: Any, name: str) -> frozenset[int]:
    entries = listed.items() if isinstance(listed, dict) else ()
    return frozenset(int(key) for key, token in entries if key.isdigit() and _text(token) == name)


def _ids_in_file(path: Path, name: str) -> frozenset[int]:
    tokens = _read(path, _Extra).added_tokens if path.is_file() else []
    return frozenset(each.id for each in tokens if each.content == name)


_OF_REQUESTS: Final = {"whisper": ("suppress_tokens", "begin_suppress_tokens")}
"""By model type: keys of generation_config.json that requests bring with them."""
_ADVICE: Final = "; --generation-config vllm takes only end tokens from it"


def read_eos(
    raw: RawConfig, directory: Path, model: ModelSettings, vocab_size: int
) -> frozenset[int]:
    """generation_config.json's or else config.json's, and the tokenizer's, as vLLM has it.

    Those that the model can draw. Raises CheckpointError.
    """
    ids = _configured(raw, directory, model) | tokenizer_eos(model)
    return frozenset(each for each in ids if each < vocab_size)


def _configured(raw: RawConfig, directory: Path, model: ModelSettings) -> frozenset[int]:
    path = directory / "generation_config.json"
    text = raw.part("text_config")
    sources = [raw] if text is None else [raw, text]
    generation = sources  # of older checkpoints, which transformers and vLLM read so as well
    if path.exists():
        generation = [read_json(path)]
        sources = generation + sources
    for source in generation if model.generation_config == "auto" else ():
        for key in _OF_REQUESTS.get(str(raw.get("model_type")), ()):
            source.get(key)
        refuse_keys(source, REFUSED_IN_GENERATION, _ADVICE)
    for source in sources:
        value = source.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise CheckpointError(
                f"{source.origin}: eos_token_id is {value!r}, not a token id or a list of them",
                param="eos_token_id",
            )
        return frozenset(ids)
    return frozenset()

"""Loads a model's tokenizer, templates and properties.
transformers reads and converts the tokenizer; then only the Rust tokenizer is kept, which threads
may share. It is imported late: `forbid_torch` must run before.
"""

import hashlib
import json
import logging
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from tokenizers import Tokenizer, normalizers

from tokenmesh.services.tokenizer_svc.render_job import JsonObject
from tokenmesh.services.tokenizer_svc.retrieval import COLQWEN2, RetrievalPrompts, read_retrieval
from tokenmesh.services.tokenizer_svc.score_template import ScoreTemplate, declared_template
from tokenmesh.services.tokenizer_svc.token_length import LengthBound, length_bound
from tokenmesh.shared.allocator import trim_heap
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.config_overrides import overridden
from tokenmesh.shared.errors import CheckpointError, ConfigError
from tokenmesh.shared.model_files import locate_model, sentence_config_path, served_part
from tokenmesh.shared.placeholder_files import placeholder_problem
from tokenmesh.shared.unpacked import MADE_BY

logger = logging.getLogger(__name__)

DEFAULT_TEMPLATE = "default"

_SAMPLING_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""transformers' names -> ours (and vLLM's)."""

PART_BYTES: Final = 1 << 20
"""The part of a tokenizer's text in one message: well below the maximum size of one."""


@dataclass(frozen=True, slots=True)
class LoadedTokenizer:
    """The tokenizer of a model, and its properties."""

    directory: Path
    config: JsonObject
    """`inner_config` of config.json."""
    tokenizer_config: JsonObject
    """tokenizer_config.json, unchanged."""
    tokenizer: Tokenizer
    lean_json: bytes
    """See `lean_json`."""
    whole_json: list[bytes]
    """The tokenizer's text in parts of `PART_BYTES`, each compressed, for gateways of former
    versions: to write it anew would keep all threads waiting for some tenths of a second."""
    num_json_bytes: int
    """The size of that text."""
    fingerprint: str
    length_bound: LengthBound | None
    vocab_size: int
    special_tokens: dict[str, object]
    """Template variables such as `bos_token`."""
    special_ids: list[int]
    templates: dict[str, str]
    """By name; requests use `default` unless they name another."""
    default_sampling: JsonObject
    max_model_len: int | None
    eos_token_ids: list[int]
    """Tokens that end an answer."""
    has_type_ids: bool
    """True where the model reads which text of a pair a token belongs to."""
    prompts: dict[str, str]
    """Texts that sentence-transformers puts before a text, by the purpose of its embedding."""
    around_text: tuple[str, str] = ("", "")
    """Texts that the model's processor puts before and behind a text that it embeds."""
    padding_id: int | None = None
    score_template: ScoreTemplate | None = None
    """The template that makes a prompt of a pair that is scored; None: the tokenizer's own form of
    a pair."""


def load_model(settings: ModelSettings) -> LoadedTokenizer:
    """Load from a local directory or the hub; blocks. Raises CheckpointError or ConfigError."""
    directory = overridden(checkpoint_dir(settings.model, settings.revision), settings.hf_overrides)
    own = settings.tokenizer is None or settings.tokenizer == settings.model
    home = directory if own else checkpoint_dir(settings.tokenizer or "", None)
    stated = read_config(directory)
    config, retrieval = inner_config(stated), None
    source = _load_tokenizer(home)
    tokenizer = source.tokenizer
    # A tokenizer.json may set these; prompts are truncated here, if the request says so.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _lower_texts(tokenizer, directory)
    text = tokenizer.to_str().encode()
    fingerprint, lean = hashlib.sha256(text).hexdigest(), lean_json(text)
    whole = _compressed(text), len(text)
    del text
    bound = length_bound(lean)
    # parsing a large vocabulary takes several times the memory that its tokenizer keeps
    trim_heap()
    added, size = tokenizer.get_added_tokens_decoder(), tokenizer.get_vocab_size()
    text_model = text_config(config)
    if stated.get("model_type") == COLQWEN2:
        retrieval = read_retrieval(directory, source.pad_token)
    templates = _templates(settings, source.chat_template, directory, retrieval)
    sizes = (positive_int(text_model.get("vocab_size")) or 0, size, *(i + 1 for i in added))
    return LoadedTokenizer(
        directory=directory,
        config=config,
        tokenizer_config=source.config,
        tokenizer=tokenizer,
        lean_json=lean,
        whole_json=whole[0],
        num_json_bytes=whole[1],
        fingerprint=fingerprint,
        length_bound=bound,
        vocab_size=max(sizes),
        special_tokens=source.special_tokens,
        special_ids=sorted(index for index, token in added.items() if token.special),
        templates=templates,
        default_sampling=_default_sampling(settings, directory, config),
        max_model_len=settings.stated_len or _stated_length(text_model),
        eos_token_ids=_eos_token_ids(directory, text_model, source.eos_token_id),
        has_type_ids=source.has_type_ids,
        prompts=_prompts(directory),
        around_text=("", "") if retrieval is None else retrieval.around_text,
        padding_id=source.padding_id,
        score_template=_score_template(settings, directory, templates),
    )


@dataclass(frozen=True, slots=True)
class _Source:
    """A tokenizer as its checkpoint has it, with what stands next to it."""

    tokenizer: Tokenizer
    config: JsonObject
    """tokenizer_config.json, unchanged."""
    special_tokens: dict[str, object]
    chat_template: object = None
    eos_token_id: object = None
    pad_token: str = "None"
    padding_id: int | None = None
    has_type_ids: bool = False


def _of_unpacked(directory: Path, config: JsonObject) -> _Source:
    """Read files that `locate_model` wrote, which need none of transformers' rules and repairs."""
    tokenizer: Tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    names = ("bos_token", "eos_token")
    special: dict[str, object] = {each: config[each] for each in names if each in config}
    eos = special.get("eos_token")
    return _Source(
        tokenizer,
        config,
        special,
        config.get("chat_template"),
        None if eos is None else tokenizer.token_to_id(str(eos)),
    )


def _load_tokenizer(directory: Path) -> _Source:
    config = read_json(directory / "tokenizer_config.json")
    if MADE_BY.items() <= config.items():
        return _of_unpacked(directory, config)
    from transformers import AutoTokenizer

    check_has_tokenizer(directory)
    try:
        found = AutoTokenizer.from_pretrained(
            directory, trust_remote_code=False, local_files_only=True
        )
    # tokenizers raises bare Exception for a file that it cannot read.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"[:500]
        raise CheckpointError(f"{directory}: its tokenizer cannot be loaded: {reason}") from error
    if not found.is_fast:
        raise CheckpointError(
            f"{directory}: {type(found).__name__} has no tokenizer.json form, which the "
            "gateway needs to turn tokens into text"
        )
    return _Source(
        found.backend_tokenizer,
        config,
        {name: str(token) for name, token in found.special_tokens_map.items()},
        found.chat_template,
        found.eos_token_id,
        str(found.pad_token),
        found.pad_token_id,
        "token_type_ids" in found.model_input_names,
    )


def _compressed(text: bytes) -> list[bytes]:
    starts = range(0, len(text), PART_BYTES)
    return [zlib.compress(text[start : start + PART_BYTES], level=1) for start in starts]


def lean_json(text: bytes) -> bytes:
    """A tokenizer.json without the merges, most of its bytes: enough to turn ids into text."""
    whole = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    model = msgspec.json.decode(whole["model"], type=dict[str, msgspec.Raw])
    if "merges" in model:
        model["merges"] = msgspec.Raw(b"[]")
    return msgspec.json.encode({**whole, "model": model})


def _stated_length(config: JsonObject) -> int | None:
    names = ("max_position_embeddings", "max_target_positions")
    return next(filter(None, (positive_int(config.get(name)) for name in names)), None)


def _lower_texts(tokenizer: Tokenizer, directory: Path) -> None:
    """Where sentence-transformers lowers them before a cased tokenizer."""
    path = sentence_config_path(directory)
    if path is None or read_json(path).get("do_lower_case") is not True:
        return
    own = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])


def _prompts(directory: Path) -> dict[str, str]:
    found = read_json(directory / "config_sentence_transformers.json").get("prompts")
    prompts = found if isinstance(found, dict) else {}
    return {str(name): text for name, text in prompts.items() if isinstance(text, str)}


def _templates(
    settings: ModelSettings, found: object, directory: Path, retrieval: RetrievalPrompts | None
) -> dict[str, str]:
    if settings.chat_template is not None:
        return {DEFAULT_TEMPLATE: _read_template(settings.chat_template)}
    if retrieval is not None:  # what the files hold is that of the model it was made of
        return {DEFAULT_TEMPLATE: retrieval.template}
    # Older processors keep the template of an image model in a separate file.
    processor = read_json(directory / "chat_template.json").get("chat_template")
    for source in (processor, found):
        if isinstance(source, str):
            return {DEFAULT_TEMPLATE: source}
        if isinstance(source, dict):
            return {str(name): str(text) for name, text in source.items()}
    return {}


def _score_template(
    settings: ModelSettings, directory: Path, templates: dict[str, str]
) -> ScoreTemplate | None:
    if settings.chat_template is not None:
        return ScoreTemplate(DEFAULT_TEMPLATE)
    found = declared_template(directory, read_json, templates, DEFAULT_TEMPLATE)
    if found is None and read_json(directory / "config.json").get("classifier_from_token"):
        logger.warning(
            "%s scores pairs by two tokens behind them, without a prompt: if it was trained with "
            "one, as Qwen3-Reranker was, set --chat-template",
            directory,
        )
    return found


def _read_template(setting: str) -> str:
    if "\n" in setting or "{" in setting:
        return setting
    try:
        return Path(setting).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"chat_template is neither a readable file nor a template: {error}",
            param="chat_template",
        ) from error


def _eos_token_ids(directory: Path, config: JsonObject, of_tokenizer: object) -> list[int]:
    """Those of generation_config.json, else of config.json, and the tokenizer's."""
    configured = read_json(directory / "generation_config.json").get("eos_token_id")
    if configured is None:
        configured = config.get("eos_token_id")
    found = configured if isinstance(configured, list) else [configured]
    ids = {each for each in (*found, of_tokenizer) if type(each) is int and each >= 0}
    return sorted(ids)


def _default_sampling(settings: ModelSettings, directory: Path, config: JsonObject) -> JsonObject:
    """The values of generation_config.json, or of config.json where that file is missing.

    The settings' lie over them. Raises ConfigError for one that requests do not have.
    """
    over = settings.override_generation_config
    for name in over:
        if name not in _SAMPLING_FIELDS:
            known = ", ".join(_SAMPLING_FIELDS)
            what = f"override_generation_config: {name} is none of {known}"
            raise ConfigError(what, param="override_generation_config")
    path = directory / "generation_config.json"
    found: JsonObject = {}
    if settings.generation_config != "vllm":
        found = read_json(path) if path.exists() else {**text_config(config), **config}
    found = {**found, **over}
    return {
        ours: found[theirs]
        for theirs, ours in _SAMPLING_FIELDS.items()
        if found.get(theirs) is not None
    }


_HUB_FILES: Final = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
_TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "sentencepiece.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
)


def checkpoint_dir(model: str, revision: str | None) -> Path:
    """The local directory of a checkpoint; a hub id is downloaded first, without its weights.

    Raises CheckpointError.
    """
    return locate_model(model, revision, *_HUB_FILES)


def check_has_tokenizer(directory: Path) -> None:
    """Raise CheckpointError, which lists the accepted files, for a directory without tokenizer."""
    if any((directory / name).is_file() for name in _TOKENIZER_FILES):
        return
    if any(directory.glob("*.tiktoken")):
        return
    raise CheckpointError(
        f"{directory} holds no tokenizer: none of {', '.join(_TOKENIZER_FILES)} was found"
    )


def read_json(path: Path) -> JsonObject:
    """The object in a file; empty if the file is missing. Raises CheckpointError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        problem = placeholder_problem(path) or error
        raise CheckpointError(f"{path} cannot be read: {problem}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return value


def read_config(directory: Path) -> JsonObject:
    """config.json of what is served of a checkpoint. Raises CheckpointError."""
    return served_part(read_json(directory / "config.json"))


def inner_config(config: JsonObject) -> JsonObject:
    """The vision-language model that a config.json puts a head on; else the config itself."""
    inner = config.get("vlm_config")
    return inner if isinstance(inner, dict) else config


def text_config(config: JsonObject) -> JsonObject:
    """The language model's part of a config.json."""
    nested = config.get("text_config") or config.get("llm_config")
    return {**config, **nested} if isinstance(nested, dict) else config


def positive_int(value: object) -> int | None:
    """`value` if it is a positive integer."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    return value if is_int and isinstance(value, int) and value > 0 else None


def forbid_torch() -> None:
    """Make imports of torch fail: transformers would load it, with 180 MB and two seconds.

    Call it before transformers is imported.
    """
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    logging.getLogger("transformers").addFilter(
        lambda record: "PyTorch was not found" not in record.getMessage()
    )

"""Define what a checkpoint is served for, from its files alone: config.json and modules.json.

A simulated worker reads the same, so nothing here imports torch.
"""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from tokenmesh.engine.api.pooling import PoolTask
from tokenmesh.engine.models.pooling.facts import EMBEDDINGS, PoolingFacts
from tokenmesh.engine.models.pooling.instruction import (
    is_gritlm,
    read_rule,
)
from tokenmesh.engine.models.pooling.modules import (
    LogitScore,
    SentenceModules,
    read_modules,
)
from tokenmesh.engine.models.raw_config import RawConfig, architecture_of, read_json
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.errors import CheckpointError, ConfigError
from tokenmesh.shared.model_files import sentence_config_path
from tokenmesh.shared.tensor_file import TensorShards

COLBERT: Final = "HF_ColBERT"
"""The architecture of Stanford's ColBERT checkpoints, which transformers has no class for."""
PROJECTION: Final = "linear.weight"
"""The tensor that makes ColBERT's token embeddings of states."""
COLQWEN2: Final = "ColQwen2ForRetrieval"
"""Late interaction by Qwen2-VL: a vector for each token of a text or of an image."""
_RETRIEVERS: Final = "ForRetrieval"
_CLASSIFIERS: Final = ("ForSequenceClassification",)
_TOKEN_CLASSIFIERS: Final = ("ForTokenClassification",)
_SCORES: Final[tuple[PoolTask, ...]] = ("classify", "score")
_EACH: Final[tuple[PoolTask, ...]] = ("token_classify",)
_GENERATORS: Final = (
    "ForCausalLM",
    "ForConditionalGeneration",
    "LMHeadModel",
    "ForImageTextToText",
)


def pools(model: ModelSettings, raw: RawConfig, directory: Path) -> bool:
    """Return whether the model is served for pooling; else it generates.

    By its settings, else by what the checkpoint is: one with modules of sentence-transformers, and
    any that is not made for generating text. One that does not say what it is made for generates,
    which only the simulated engine does without `architectures`.
    """
    if model.runner != "auto":
        return model.runner == "pooling"
    if model.convert not in ("auto", "none"):
        return True
    if (directory / "modules.json").exists():
        return True
    return bool(raw.get("architectures")) and not architecture_of(raw).endswith(_GENERATORS)


_TAKES: Final = {"CLS": "cls", "LAST": "lasttoken", "MEAN": "mean"}
"""By vLLM's names."""


def modules_of(
    directory: Path, is_causal: bool, pooling_type: str | None = None
) -> SentenceModules:
    """Those of the checkpoint; else what vLLM takes: a decoder's last token, an encoder's first.

    `pooling_type` replaces what is taken of a text. A reranker that scores by two tokens of a
    decoder may say so in config.json, with vLLM's keys.
    """
    raw = read_json(directory / "config.json")
    if is_gritlm(raw):
        return SentenceModules(("mean",))
    score = _score_by_tokens(raw, directory)
    if score is not None:
        return SentenceModules(score=score)
    found = read_modules(directory)
    modules = found or SentenceModules(("lasttoken",) if is_causal else ("cls",))
    return modules if pooling_type is None else replace(modules, takes=(_TAKES[pooling_type],))


def _score_by_tokens(raw: RawConfig, directory: Path) -> LogitScore | None:
    names = raw.get("classifier_from_token")
    if names is None:
        return None
    if not isinstance(names, list) or len(names) != 2:
        raise raw.error("classifier_from_token", f"is {names!r}, not a list of two tokens")
    if raw.get("method") not in (None, "from_2_way_softmax"):
        raise raw.error("method", f"is {raw.get('method')!r}, which is not supported")
    tokenizer = read_json(directory / "tokenizer.json")
    model = tokenizer.part("model")
    vocabulary = model.get("vocab") if model is not None else None
    ids = [vocabulary.get(each) if isinstance(vocabulary, dict) else None for each in names]
    false_id, true_id = ids
    if not isinstance(false_id, int) or not isinstance(true_id, int):
        raise raw.error("classifier_from_token", f"{names!r} are not tokens of tokenizer.json")
    return LogitScore(true_id, false_id)


def read_pooling(model: ModelSettings, raw: RawConfig, directory: Path) -> PoolingFacts:
    """Return the facts of a model that `pools`. Raises CheckpointError and ConfigError."""
    facts = _read_pooling(model, raw, directory)
    task = model.pooling_task
    tasks = facts.tasks
    if task is not None:
        # A model that scores does so by its class.
        tasks = tuple(each for each in tasks if each == task or (task, each) == _SCORES)
        if not tasks:
            known = ", ".join(facts.tasks)
            what = f"pooling_task is {task}; {model.model} does: {known}"
            raise ConfigError(what, param="pooling_task")
    if model.pooling_type is not None and not EMBEDDINGS & {*facts.tasks}:
        what = f"pooling_type is for embeddings; {model.model} does: {', '.join(facts.tasks)}"
        raise ConfigError(what, param="pooling_type")
    _check_lengths(model, facts)
    return replace(
        facts,
        tasks=tasks,
        pooling_type=model.pooling_type,
        activates=model.pooling_activation,
        in_chunks=model.embed_in_chunks,
        max_embed_len=model.max_embed_len or 0,
    )


def _check_lengths(model: ModelSettings, facts: PoolingFacts) -> None:
    """Raises ConfigError for lengths of embeddings that the model cannot have."""
    for name in ("embed_in_chunks", "max_embed_len"):
        if getattr(model, name) and "embed" not in facts.tasks:
            what = f"{name} is for embeddings; {model.model} does: {', '.join(facts.tasks)}"
            raise ConfigError(what, param=name)
    if model.embed_in_chunks and facts.instruction is not None:
        what = "embed_in_chunks: a part of a text would have no instruction, which this model needs"
        raise ConfigError(what, param="embed_in_chunks")


def _read_pooling(model: ModelSettings, raw: RawConfig, directory: Path) -> PoolingFacts:
    architecture, text = architecture_of(raw), text_part(raw)
    if architecture.endswith(_RETRIEVERS) and architecture != COLQWEN2:
        problem = f"names {architecture}, which is not supported; of its kind {COLQWEN2} is"
        raise raw.error("architectures", problem)
    is_causal = not is_bidirectional(raw)
    modules = modules_of(directory, is_causal, model.pooling_type)
    num_types = text.integer("type_vocab_size", 1, minimum=0) or 1
    if modules.score is not None:
        return PoolingFacts((*_SCORES, *_EACH), 1, ("score",), is_causal, num_types)
    if architecture.endswith(_TOKEN_CLASSIFIERS) and model.convert != "embed":
        labels = _labels(raw)
        facts = PoolingFacts(_EACH, len(labels), labels, is_causal, num_types)
        return replace(facts, labels_tokens=True)
    if architecture.endswith(_CLASSIFIERS) and model.convert != "embed":
        labels = _labels(raw)
        tasks = _SCORES if len(labels) == 1 else _SCORES[:1]
        return PoolingFacts((*tasks, *_EACH), len(labels), labels, is_causal, num_types)
    if model.convert == "classify":
        problem = f"convert is classify, and {architecture} has no classifier"
        raise ConfigError(problem, param="convert")
    if architecture == COLBERT:
        if (code := raw.part("auto_map")) is not None:
            # whatever model_type says, transformers has no class for the body
            raise raw.error("auto_map", f"is {code.values!r}: {COLBERT} of such code is not served")
        size = _colbert_size(raw, directory)
        return PoolingFacts(("token_embed",), size, (), is_causal, num_types)
    if architecture == COLQWEN2:
        return PoolingFacts(("token_embed",), raw.integer("embedding_dim", 128), (), True)
    size = text.integer("hidden_size", _other_width(text))
    facts = _embeds(raw, modules, size, is_causal, num_types)
    return replace(facts, instruction=read_rule(directory)) if is_gritlm(raw) else facts


def _colbert_size(raw: RawConfig, directory: Path) -> int:
    """The size of the projection itself; without weights, what config.json says.

    A key may be the body's: `dim` is the hidden size of DistilBERT.
    """
    with suppress(CheckpointError):  # a simulated worker has no weights
        shards = TensorShards(directory, lambda name: name == PROJECTION)
        if PROJECTION in shards:
            return shards.file_of(PROJECTION)[PROJECTION].shape[0]
    for key in ("colbert_dim", "dim"):
        if raw.get(key) is not None:
            return raw.integer(key)
    return 128


def text_part(raw: RawConfig) -> RawConfig:
    """The config of the language model, which may be within that of a vision-language model."""
    inner = raw.part("vlm_config") or raw
    return inner.part("text_config") or inner


def _embeds(
    raw: RawConfig, modules: SentenceModules, size: int, is_causal: bool, num_types: int
) -> PoolingFacts:
    sizes = raw.get("matryoshka_dimensions") or []
    return PoolingFacts(
        tasks=("embed", "token_embed") if modules.takes else ("token_embed",),
        size=modules.size_of(size),
        is_causal=is_causal,
        num_types=num_types,
        dimensions=tuple(each for each in sizes if isinstance(each, int)),
        any_dimension=not sizes and raw.flag("is_matryoshka"),
    )


def is_bidirectional(raw: RawConfig) -> bool:
    """Return whether tokens depend on later ones: of encoders, and of decoders whose config says
    so.
    """
    text = text_part(raw)
    if text.get("use_bidirectional_attention") or text.get("is_causal") is False:
        return True
    return is_gritlm(raw) or str(raw.get("model_type")) in ENCODERS


ENCODERS: Final = frozenset(
    {
        *("albert", "bert", "camembert", "data2vec-text", "deberta", "deberta-v2", "distilbert"),
        *("electra", "ernie", "esm", "eurobert", "gte", "jina_embeddings_v3", "megatron-bert"),
        *("modernbert", "mobilebert", "mpnet", "nomic_bert", "rembert", "roberta"),
        *("roberta-prelayernorm", "roformer", "squeezebert", "xlm-roberta", "xlm-roberta-xl"),
    }
)
"""Values of model_type whose tokens see each other. The check at load compares what is served with
what transformers computes, so one that is missing here is refused, never served wrongly."""


def _other_width(text: RawConfig) -> int | None:
    """Some configs have another name for the hidden size."""
    for key in ("dim", "d_model", "n_embd"):
        if text.get(key) is not None:
            return text.integer(key)
    return None


def _labels(raw: RawConfig) -> tuple[str, ...]:
    """As transformers reads them: id2label, else num_labels of them, else two."""
    named: Any = raw.get("id2label")
    if isinstance(named, dict) and named:
        try:
            return tuple(str(named[key]) for key in sorted(named, key=int))
        except ValueError:
            raise raw.error("id2label", "has keys that are not numbers") from None
    return tuple(f"LABEL_{index}" for index in range(raw.integer("num_labels", 2)))


def stated_length(model: ModelSettings, longest: int, directory: Path) -> int:
    """Tokens of the longest prompt: as set, else where sentence-transformers cuts it.

    longest: what the model was made for. Raises ConfigError.
    """
    if model.stated_len is not None:
        if model.stated_len > longest:
            raise ConfigError(
                f"max_model_len is {model.stated_len}; {model.model} was made for {longest}",
                param="max_model_len",
            )
        return model.stated_len
    path = sentence_config_path(directory)
    stated = read_json(path).get("max_seq_length") if path else None
    return min(longest, stated) if isinstance(stated, int) and stated > 0 else longest

"""A Whisper of CTranslate2 as a directory that every service can read."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from tokenmesh.shared.ctranslate2.reader import MODEL_FILE, Ct2File
from tokenmesh.shared.ctranslate2.tensors import WhisperTensors
from tokenmesh.shared.ctranslate2.vocabulary import END, TOKENIZER, VOCABULARIES, WhisperVocabulary
from tokenmesh.shared.errors import CheckpointError
from tokenmesh.shared.unpacked import MADE_BY, Unpacking, write_objects, write_tensors

_CONFIG: Final = "config.json"
_EXTRACTOR: Final = "preprocessor_config.json"
FILES: Final = (MODEL_FILE, _CONFIG, TOKENIZER, *VOCABULARIES, _EXTRACTOR)
"""The files that are read from such a directory."""
_UNPACKING: Final = Unpacking("ctranslate2", layout=1)
_DTYPES: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_KEYS: Final = ("suppress_ids", "suppress_ids_begin", "alignment_heads", "lang_ids")
_RATE: Final = 16000
_HOP: Final = 160
"""Samples between two frames of a spectrogram; a state of the encoder is two of them."""


def is_ctranslate2(directory: Path) -> bool:
    """Return whether a directory holds a model of CTranslate2: config.json names no model type."""
    if not (directory / MODEL_FILE).is_file():
        return False
    try:
        config = _read_object(directory / _CONFIG)
    except CheckpointError:
        return False  # who reads it says what is wrong with it
    return config.get("model_type") is None and config.get("architectures") is None


def is_whisper_config(directory: Path) -> bool:
    """Return whether config.json is a CTranslate2 Whisper's; its weights may be elsewhere."""
    try:
        config = _read_object(directory / _CONFIG)
    except CheckpointError:
        return False
    return config.get("model_type") is None and any(key in config for key in _KEYS)


def unpacked(directory: Path, folder: str | None = None) -> Path:
    """The checkpoint of a directory, made unless it is there; blocks.

    Raises CheckpointError for one that cannot be read or served.
    """
    files = [path for name in FILES if (path := directory / name).is_file()]
    return _UNPACKING.directory(directory, files, partial(_make, directory), folder)


def _make(directory: Path, target: Path) -> None:
    tensors = WhisperTensors(Ct2File.read(directory))
    stored = tensors.all()
    own = _read_object(directory / _CONFIG)
    vocabulary = WhisperVocabulary.read(directory, tensors.vocab_size)
    layers, heads = tensors.layers("decoder"), tensors.heads("decoder")
    write_objects(
        target,
        {
            _CONFIG: _config(tensors, vocabulary),
            "generation_config.json": vocabulary.generation(own, layers=layers, heads=heads),
            TOKENIZER: vocabulary.tokenizer(directory),
            "tokenizer_config.json": {"bos_token": END, "eos_token": END, **MADE_BY},
            _EXTRACTOR: _extractor(directory, tensors),
        },
    )
    write_tensors(target, stored)


def _config(tensors: WhisperTensors, vocabulary: WhisperVocabulary) -> dict[str, Any]:
    end = vocabulary.ids[END]
    sizes = {
        f"{part}_{name}": number
        for part in ("encoder", "decoder")
        for name, number in (
            ("layers", tensors.layers(part)),
            ("attention_heads", tensors.heads(part)),
            ("ffn_dim", tensors.inner_size(part)),
        )
    }
    return {
        "model_type": "whisper",
        "architectures": ["WhisperForConditionalGeneration"],
        "is_encoder_decoder": True,
        "dtype": _DTYPES[tensors.float_type],
        "activation_function": "gelu",
        "scale_embedding": False,
        "vocab_size": tensors.vocab_size,
        "num_mel_bins": tensors.mel_bins,
        "d_model": tensors.hidden,
        "num_hidden_layers": tensors.layers("encoder"),
        **sizes,
        "max_source_positions": tensors.source_positions,
        "max_target_positions": tensors.target_positions,
        "tie_word_embeddings": tensors.is_tied,
        "decoder_start_token_id": vocabulary.ids["<|startoftranscript|>"],
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": end,
    }


def _extractor(directory: Path, tensors: WhisperTensors) -> dict[str, Any]:
    """Options of the spectrograms: the directory's own, else those of every Whisper."""
    path = directory / _EXTRACTOR
    own = _read_object(path) if path.is_file() else {}
    found: dict[str, Any] = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": tensors.mel_bins,
        "sampling_rate": _RATE,
        "hop_length": _HOP,
        "chunk_length": 2 * tensors.source_positions * _HOP // _RATE,
        "n_fft": 400,
        **own,
    }
    if found["feature_size"] != tensors.mel_bins:
        size, bins = found["feature_size"], tensors.mel_bins
        raise _error(path, f"feature_size is {size}, and the model takes {bins} bins")
    return found


def _read_object(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _error(path, f"cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise _error(path, "does not hold a JSON object")
    return value


def _error(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(f"{path}: {problem}", param="model")

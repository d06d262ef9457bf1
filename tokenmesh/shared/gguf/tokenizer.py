"""The tokenizer of a GGUF file -> tokenizer.json and tokenizer_config.json."""

from typing import Any, Final

from tokenmesh.shared.gguf.metadata import error
from tokenmesh.shared.gguf.reader import GgufFile

_NORMAL: Final = 1
_CONTROL: Final = (3, 4)
"""Types of tokens that are found in text as a whole: control, and those that users defined."""
_SPECIAL: Final = 3
_SPACE: Final = "\u2581"
_WORDS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS: Final = {
    "llama-bpe": rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}",
    "qwen2": rf"{_WORDS}|\p{{N}}|{_REST}",
    "gpt-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
}
"""How text is cut into words before pairs are merged, by `tokenizer.ggml.pre`."""
_SAME: Final = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "default": "gpt-2"}


def tokenizer_of(file: GgufFile) -> tuple[dict[str, Any], dict[str, Any]]:
    """Contents of the two files. Raises CheckpointError for a kind that is not known."""
    kind = file.values.get("tokenizer.ggml.model")
    tokens = _list(file, "tokenizer.ggml.tokens", str)
    types = file.values.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if not isinstance(types, list) or len(types) != len(tokens):
        raise error(file, "tokenizer.ggml.token_type has another length than the tokens")
    if kind == "gpt2":
        whole = _of_bytes(file, tokens)
    elif kind == "llama":
        whole = _of_pieces(file, tokens)
    else:
        raise error(file, f"tokenizer.ggml.model is {kind!r}; supported are gpt2 and llama")
    added = [
        {
            **{"id": number, "content": token, "special": types[number] == _SPECIAL},
            **{"single_word": False, "lstrip": False, "rstrip": False, "normalized": False},
        }
        for number, token in enumerate(tokens)
        if types[number] in _CONTROL
    ]
    begin = _token(file, tokens, "bos")
    adds = file.values.get("tokenizer.ggml.add_bos_token", kind == "llama")
    whole |= {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
    whole["post_processor"] = _beginning(whole, begin) if adds and begin else None
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(adds),
        "bos_token": begin,
        "eos_token": _token(file, tokens, "eos"),
        "chat_template": file.values.get("tokenizer.chat_template"),
    }
    return whole, {key: value for key, value in config.items() if value is not None}


def _of_bytes(file: GgufFile, tokens: list[str]) -> dict[str, Any]:
    """Pairs of byte characters are merged, as in GPT-2."""
    name = file.values.get("tokenizer.ggml.pre", "default")
    pattern = _PATTERNS.get(_SAME.get(name, name)) if isinstance(name, str) else None
    if pattern is None:
        known = ", ".join([*_PATTERNS, *_SAME])
        raise error(file, f"tokenizer.ggml.pre is {name!r}; supported are {known}")
    merges = _list(file, "tokenizer.ggml.merges", str)
    byte_level = {
        **{"type": "ByteLevel", "add_prefix_space": False},
        **{"use_regex": False, "trim_offsets": False},
    }
    split = {
        **{"type": "Split", "pattern": {"Regex": pattern}},
        **{"behavior": "Isolated", "invert": False},
    }
    return {
        "normalizer": {"type": "NFC"} if name == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "decoder": byte_level,
        "model": {
            **{"type": "BPE", "vocab": _vocabulary(file, tokens), "ignore_merges": True},
            "merges": [each.split(" ", 1) for each in merges],
        },
    }


def _of_pieces(file: GgufFile, tokens: list[str]) -> dict[str, Any]:
    """Pieces with scores, as SentencePiece merges them: the best pair first."""
    scores = _list(file, "tokenizer.ggml.scores", float)
    if len(scores) != len(tokens):
        raise error(file, "tokenizer.ggml.scores has another length than the tokens")
    vocabulary = _vocabulary(file, tokens)
    merges = []
    for number, token in enumerate(tokens):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                key = (-scores[number], vocabulary[left], vocabulary[right])
                merges.append((key, [left, right]))
    merges.sort(key=lambda merge: merge[0])
    prefix = file.values.get("tokenizer.ggml.add_space_prefix", True)
    before = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    after: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        after.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = file.values.get("tokenizer.ggml.unknown_token_id", 0)
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*before, spaces]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": after},
        "model": {
            **{"type": "BPE", "vocab": vocabulary, "merges": [pair for _, pair in merges]},
            **{"byte_fallback": True, "fuse_unk": True},
            "unk_token": tokens[unknown] if unknown in range(len(tokens)) else None,
        },
    }


def _vocabulary(file: GgufFile, tokens: list[str]) -> dict[str, int]:
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise error(file, "tokenizer.ggml.tokens holds a token twice")
    return vocabulary


def _beginning(whole: dict[str, Any], token: str) -> dict[str, Any]:
    """A processor that puts a token in front of every text."""
    special = {"SpecialToken": {"id": token, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    number = whole["model"]["vocab"][token]
    return {
        "type": "TemplateProcessing",
        "single": [special, text],
        "pair": [special, text, {"SpecialToken": {"id": token, "type_id": 1}}, second],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }


def _token(file: GgufFile, tokens: list[str], name: str) -> str | None:
    number = file.values.get(f"tokenizer.ggml.{name}_token_id")
    if number is None:
        return None
    if not isinstance(number, int) or number not in range(len(tokens)):
        raise error(file, f"tokenizer.ggml.{name}_token_id is {number!r}, which no token has")
    return tokens[number]


def _list(file: GgufFile, key: str, kind: type) -> list[Any]:
    value = file.values.get(key)
    if not isinstance(value, list) or not all(isinstance(each, kind) for each in value):
        raise error(file, f"{key} is missing or not a list")
    return value

"""The tokenizer of a GGUF file -> tokenizer.json and tokenizer_config.json."""

from typing import Any, Final

from tokenmesh.shared.gguf.metadata import error
from tokenmesh.shared.gguf.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from tokenmesh.shared.gguf.reader import GgufFile

_NORMAL: Final = 1
_CONTROL: Final = (3, 4)
"""Types of tokens that are found in text as a whole: control, and those that users defined."""
_SPECIAL: Final = 3
_SPACE: Final = "\u2581"


def tokenizer_of(file: GgufFile) -> tuple[dict[str, Any], dict[str, Any]]:
    """Contents of the two files. Raises CheckpointError for a kind that is not known."""
    kind = file.values.get("tokenizer.ggml.model")
    tokens, types = _tokens(file)
    if kind == "gpt2":
        pre = _pre_tokenizer(file)
        whole, begins = _of_bytes(file, tokens, pre), pre.begins
    elif kind == "llama":
        whole, begins = _of_pieces(file, tokens), True
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
    begin, end = (_token(file, tokens, name) for name in ("bos", "eos"))
    adds_begin = bool(file.values.get("tokenizer.ggml.add_bos_token", begins) and begin)
    adds_end = bool(file.values.get("tokenizer.ggml.add_eos_token", False) and end)
    whole |= {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
    whole["post_processor"] = _around(
        whole, begin if adds_begin else None, end if adds_end else None
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": adds_begin,
        "add_eos_token": adds_end,
        "bos_token": begin,
        "eos_token": end,
        "chat_template": file.values.get("tokenizer.chat_template"),
    }
    return whole, {key: value for key, value in config.items() if value is not None}


_STOPS: Final = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>"),
        *("<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>", "[EOT]"),
        *("<eos>", "</s>", "<|END_OF_TURN_TOKEN|>", "[|endofturn|]"),
        *("<\uff5cend\u2581of\u2581sentence\uff5c>", "<end_of_utterance>"),
    }
)
"""Control tokens that end an answer, whether the file says so or not."""


def token_ids(file: GgufFile) -> dict[str, Any]:
    """Return keys of config.json: the id with which a text begins, and all that end an answer."""
    tokens, types = _tokens(file)
    found: dict[str, Any] = {}
    begin = _number(file, tokens, "bos")
    if begin is not None:
        found["bos_token_id"] = begin
    named = [_number(file, tokens, name) for name in ("eos", "eot", "eom")]
    ends = [number for number in named if number is not None]
    stops = [n for n, token in enumerate(tokens) if token in _STOPS and types[n] == _SPECIAL]
    texts = {tokens[number] for number in (*ends, *stops)}
    for number in stops:
        # a part of an answer ends with it in the format that has these two
        is_part = tokens[number] == "<|end|>" and {"<|return|>", "<|call|>"} <= texts
        if number not in ends and not is_part:
            ends.append(number)
    if ends:
        found["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return found


def _pre_tokenizer(file: GgufFile) -> PreTokenizer:
    name = file.values.get("tokenizer.ggml.pre", "default")
    found = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if found is None:
        known = ", ".join(PRE_TOKENIZERS)
        raise error(file, f"tokenizer.ggml.pre is {name!r}; supported are {known}")
    return found


def _of_bytes(file: GgufFile, tokens: list[str], pre: PreTokenizer) -> dict[str, Any]:
    """Pairs of byte characters are merged, as in GPT-2."""
    merges = _list(file, "tokenizer.ggml.merges", str)
    byte_level = {
        **{"type": "ByteLevel", "add_prefix_space": False},
        **{"use_regex": False, "trim_offsets": False},
    }
    cuts = [
        {
            **{"type": "Split", "pattern": {"Regex": cut}},
            **{"behavior": "Isolated", "invert": False},
        }
        for cut in pre.cuts
    ]
    return {
        "normalizer": {"type": "NFC"} if pre.composes else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*cuts, byte_level]},
        "decoder": byte_level,
        "model": {
            **{"type": "BPE", "vocab": _vocabulary(file, tokens)},
            "ignore_merges": pre.takes_whole_words,
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


def _around(whole: dict[str, Any], begin: str | None, end: str | None) -> dict[str, Any] | None:
    """A processor that puts tokens around every text."""
    vocabulary = whole["model"]["vocab"]
    added = [token for token in (begin, end) if token is not None]
    if not added:
        return None

    def side(name: str, number: int) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = [{"Sequence": {"id": name, "type_id": number}}]
        if begin is not None:
            parts.insert(0, {"SpecialToken": {"id": begin, "type_id": number}})
        if end is not None:
            parts.append({"SpecialToken": {"id": end, "type_id": number}})
        return parts

    return {
        "type": "TemplateProcessing",
        "single": side("A", 0),
        "pair": [*side("A", 0), *side("B", 1)],
        "special_tokens": {
            token: {"id": token, "ids": [vocabulary[token]], "tokens": [token]} for token in added
        },
    }


def _tokens(file: GgufFile) -> tuple[list[str], list[int]]:
    """All, and the type of each."""
    tokens = _list(file, "tokenizer.ggml.tokens", str)
    types = file.values.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if not isinstance(types, list) or len(types) != len(tokens):
        raise error(file, "tokenizer.ggml.token_type has another length than the tokens")
    return tokens, types


def _token(file: GgufFile, tokens: list[str], name: str) -> str | None:
    number = _number(file, tokens, name)
    return None if number is None else tokens[number]


def _number(file: GgufFile, tokens: list[str], name: str) -> int | None:
    number = file.values.get(f"tokenizer.ggml.{name}_token_id")
    if number is None:
        return None
    if not isinstance(number, int) or number not in range(len(tokens)):
        raise error(file, f"tokenizer.ggml.{name}_token_id is {number!r}, which no token has")
    return number


def _list(file: GgufFile, key: str, kind: type) -> list[Any]:
    value = file.values.get(key)
    if not isinstance(value, list) or not all(isinstance(each, kind) for each in value):
        raise error(file, f"{key} is missing or not a list")
    return value

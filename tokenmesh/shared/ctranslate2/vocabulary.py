"""Tokens of a Whisper in CTranslate2: its tokenizer, and what its special tokens mean.

The vocabulary names the token of each row of the embedding: text, the end, the start, languages,
tasks, and times. tokenizer.json of Whisper's former releases lacks the times; a directory without
one has what its vocabulary tells, since the merges of a byte-level vocabulary are in its order.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from tokenmesh.shared.errors import CheckpointError
from tokenmesh.shared.placeholder_files import placeholder_problem

VOCABULARIES: Final = ("vocabulary.json", "vocabulary.txt")
TOKENIZER: Final = "tokenizer.json"
END: Final = "<|endoftext|>"
_START: Final = "<|startoftranscript|>"
_TRANSLATE: Final = "<|translate|>"
_TRANSCRIBE: Final = "<|transcribe|>"
_PREVIOUS: Final = "<|startofprev|>"
_NO_TIMES: Final = "<|notimestamps|>"
_NEEDED: Final = (END, _START, _TRANSLATE, _TRANSCRIBE, _PREVIOUS, _NO_TIMES)
_LANGUAGE: Final = re.compile(r"<\|[a-z]{2,4}\|>")
_MOST_BYTES: Final = 64 << 20
"""The largest file; those of the largest Whisper have 3 MB."""
_LAST_FIRST_TIME: Final = 50
"""A transcript begins within a second, in faster-whisper and in OpenAI's Whisper."""


@dataclass(frozen=True, slots=True)
class WhisperVocabulary:
    """Texts of all tokens by id."""

    path: Path
    tokens: Sequence[str]
    ids: dict[str, int]
    """The ids of special tokens, by their text."""

    @classmethod
    def read(cls, directory: Path, rows: int) -> "WhisperVocabulary":
        """Raises CheckpointError for one that does not fit an embedding of `rows`."""
        path = next((each for name in VOCABULARIES if (each := directory / name).is_file()), None)
        if path is None:
            raise _error(directory, f"holds neither {' nor '.join(VOCABULARIES)}")
        text = _read_text(path)
        if path.suffix == ".json":
            tokens = _json(path, text)
            if not isinstance(tokens, list) or not all(isinstance(each, str) for each in tokens):
                raise _error(path, "is not a list of tokens")
        else:
            tokens = text.removesuffix("\n").split("\n")
        if len(tokens) != rows:
            raise _error(path, f"has {len(tokens)} tokens, and the embedding has {rows} rows")
        if missing := [each for each in _NEEDED if each not in tokens]:
            raise _error(path, f"lacks the token {missing[0]}")
        first = tokens.index(END)
        ids = {token: first + index for index, token in enumerate(tokens[first:])}
        found = cls(path, tokens, ids)
        order = [found.ids.get(each, -1) for each in (END, _START, _TRANSLATE, _NO_TIMES)]
        if order != sorted(order) or order[0] < 0:
            raise _error(path, "does not name text, languages, tasks and times in this order")
        return found

    @property
    def is_multilingual(self) -> bool:
        """The vocabulary of English-only models is that of GPT-2, without an empty token."""
        return "" in self.tokens

    def tokenizer(self, directory: Path) -> dict[str, Any]:
        """The content of a tokenizer.json. Raises CheckpointError for one of another model."""
        path = directory / TOKENIZER
        if not path.is_file():
            return self._from_tokens()
        whole = _json(path, _read_text(path))
        try:
            own, added = whole["model"]["vocab"], whole["added_tokens"]
            ids = {**own, **{each["content"]: each["id"] for each in added}}
        except (TypeError, KeyError) as error:
            raise _error(path, f"is not a tokenizer ({error!r})") from error
        for token in _NEEDED:
            if ids.get(token) != self.ids[token]:
                found, wanted = ids.get(token), self.ids[token]
                raise _error(path, f"{token} is {found}, and {wanted} in {self.path.name}")
        first = len(own.keys() | {each["content"] for each in added})
        times = range(max(first, self.ids[_NO_TIMES] + 1), len(self.tokens))
        whole["added_tokens"] = [*added, *(self._added(each, special=False) for each in times)]
        return dict(whole)

    def generation(self, config: Mapping[str, Any], *, layers: int, heads: int) -> dict[str, Any]:
        """The content of a generation_config.json, from config.json of the directory.

        layers, heads: of the decoder. Where no heads are named for alignment, those of the last
        half of layers follow the speech, as CTranslate2's converter has it.
        """
        last_half = [[layer, head] for layer in range(layers // 2, layers) for head in range(heads)]
        found: dict[str, Any] = {
            "bos_token_id": self.ids[END],
            "eos_token_id": self.ids[END],
            "pad_token_id": self.ids[END],
            "decoder_start_token_id": self.ids[_START],
            "no_timestamps_token_id": self.ids[_NO_TIMES],
            "prev_sot_token_id": self.ids[_PREVIOUS],
            "max_initial_timestamp_index": _LAST_FIRST_TIME,
            "suppress_tokens": config.get("suppress_ids") or [],
            "begin_suppress_tokens": config.get("suppress_ids_begin") or [],
            "alignment_heads": config.get("alignment_heads") or last_half,
            "return_timestamps": False,
            "is_multilingual": self.is_multilingual,
        }
        if self.is_multilingual:
            found["lang_to_id"] = self._languages()
            tasks = {"transcribe": _TRANSCRIBE, "translate": _TRANSLATE}
            found["task_to_id"] = {name: self.ids[token] for name, token in tasks.items()}
        return found

    def _languages(self) -> dict[str, int]:
        between = self.tokens[self.ids[_START] + 1 : self.ids[_NO_TIMES]]
        return {each: self.ids[each] for each in between if _LANGUAGE.fullmatch(each)}

    def _from_tokens(self) -> dict[str, Any]:
        text = {token: index for index, token in enumerate(self.tokens[: self.ids[END]])}
        special = range(self.ids[END], self.ids[_NO_TIMES] + 1)
        times = range(self.ids[_NO_TIMES] + 1, len(self.tokens))
        bytewise = {"add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        return {
            "version": "1.0",
            "added_tokens": [
                *(self._added(each, special=True) for each in special),
                *(self._added(each, special=False) for each in times),
            ],
            "normalizer": None,
            "pre_tokenizer": {"type": "ByteLevel", **bytewise},
            "post_processor": None,
            "decoder": {"type": "ByteLevel", **bytewise},
            "model": {"type": "BPE", "vocab": text, "merges": _merges(text)},
        }

    def _added(self, index: int, *, special: bool) -> dict[str, Any]:
        sides = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": not special}
        return {"id": index, "content": self.tokens[index], **sides, "special": special}


def _merges(ids: dict[str, int]) -> list[list[str]]:
    """The two parts of each token: what merges of earlier tokens leave of its characters."""
    found = []
    for token, index in ids.items():
        parts = list(token)
        while len(parts) > 2:
            pairs = [(ids.get(a + b, index), at) for at, (a, b) in enumerate(pairwise(parts))]
            rank, at = min(pairs)
            if rank >= index:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            found.append(parts)
    return found


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise _error(path, f"is larger than {_MOST_BYTES} bytes")
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise _error(path, f"cannot be read: {error}") from error
    if problem := placeholder_problem(path):
        raise _error(path, f"cannot be read: {problem}")
    return text


def _json(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _error(path, f"is not JSON: {error}") from error


def _error(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(f"{path}: {problem}", param="model")

"""A tiny random model with a tokenizer, and grammars for it that are compiled in this process."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import transformers

from tests.fakes.models import randomized
from tests.fakes.tokenizers import byte_level_bpe
from tokenmesh.engine.grammar.backends import make_backend
from tokenmesh.engine.grammar.compile_here import LocalCompiler
from tokenmesh.engine.grammar.matcher import Backend, Grammar
from tokenmesh.shared.config.worker import GrammarBackend
from tokenmesh.shared.messages.structured import Structured

VOCAB: Final = 512
"""More than the tokenizer's: the rest is padding."""
EOS: Final = 2


def make_checkpoint(directory: Path) -> Path:
    """A Llama of 512 ids, of which its byte-level tokenizer has about 400."""
    byte_level_bpe(directory)
    sizes: Mapping[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 1024,
        "bos_token_id": 0,
        "eos_token_id": EOS,
        "tie_word_embeddings": False,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    randomized(model).save_pretrained(directory)
    return directory


class Grammars:
    """Compiles at once, with the library of that name, or `auto` as a worker does."""

    def __init__(self, directory: Path) -> None:
        self._compiler = LocalCompiler(directory / "tokenizer.json", VOCAB, frozenset({EOS}))
        self.tokens = self._compiler.tokens
        self._backends: dict[str, Backend] = {}

    def compile(self, structured: Structured, setting: GrammarBackend = "auto") -> Grammar:
        """Raises CannotCompile when no backend can."""
        if setting == "auto":
            return self._compiler.compile(structured)
        if setting not in self._backends:
            self._backends[setting] = make_backend(setting, self.tokens)
        backend = self._backends[setting]
        return backend.load(backend.compile(structured))

    def text(self, ids: list[int]) -> str:
        """Return the text of ids, without specials."""
        return b"".join(self.tokens.tokens[each] for each in ids).decode("utf-8", "replace")

    def ids(self, text: str) -> list[int]:
        """A text byte by byte."""
        by_piece = {piece: index for index, piece in enumerate(self.tokens.tokens) if piece}
        return [by_piece[bytes([byte])] for byte in text.encode()]


def json_schema(schema: Mapping[str, Any], **options: Any) -> Structured:
    return Structured(kind="json", text=json.dumps(schema), **options)

"""Grammars that are compiled in the calling thread, without bounds of time and memory."""

from pathlib import Path

from tokenmesh.engine.api.structured import Structured
from tokenmesh.engine.grammar.backends import backends_of, make_backend
from tokenmesh.engine.grammar.matcher import Backend, CannotCompile, Grammar
from tokenmesh.engine.grammar.token_table import read_token_table
from tokenmesh.shared.config.worker import GrammarBackend


class LocalCompiler:
    """Compiles for one vocabulary, with the libraries that a worker would take."""

    def __init__(self, tokenizer_file: Path, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self.tokens = read_token_table(tokenizer_file, vocab_size, eos_ids)
        self._backends: dict[str, Backend] = {}

    def compile(self, structured: Structured, setting: GrammarBackend = "auto") -> Grammar:
        """Raises CannotCompile with the reason of the last library, where none can."""
        for name in backends_of(setting):
            if name not in self._backends:
                self._backends[name] = make_backend(name, self.tokens)
            backend = self._backends[name]
            try:
                return backend.load(backend.compile(structured))
            except CannotCompile as error:
                reason = error
        raise reason

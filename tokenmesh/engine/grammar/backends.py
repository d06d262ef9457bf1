"""Know which backend compiles what. Libraries are imported when the first grammar needs them."""

from typing import Final

from tokenmesh.engine.grammar.compile_job import BackendName
from tokenmesh.engine.grammar.lean_import import import_lean
from tokenmesh.engine.grammar.matcher import Backend
from tokenmesh.engine.grammar.token_table import TokenTable
from tokenmesh.shared.config.worker import GrammarBackend

_XGRAMMAR_BACKEND: Final = "tokenmesh.engine.grammar.xgrammar_backend"
# The client does nothing wrong with what xgrammar does not follow to the letter: calls in place of
# an answer, lengths of strings in ordinary schemas. `auto` is the same without the logged line.
_ORDER: Final[dict[GrammarBackend, tuple[BackendName, ...]]] = {
    "auto": ("xgrammar", "guidance"),
    "xgrammar": ("xgrammar", "guidance"),
    "guidance": ("guidance",),
}


def backends_of(setting: GrammarBackend) -> tuple[BackendName, ...]:
    """Those to try, in order."""
    return _ORDER[setting]


def make_backend(name: BackendName, tokens: TokenTable, *, compiles_only: bool = False) -> Backend:
    """Takes a good part of a second for a large vocabulary.

    compiles_only: grammars are compiled and tried out for a few tokens, no stream follows them.
    """
    if name == "xgrammar":
        backend: Backend = import_lean(_XGRAMMAR_BACKEND).XGrammarBackend(tokens)
        return backend
    from tokenmesh.engine.grammar.guidance_backend import GuidanceBackend

    return GuidanceBackend(tokens, has_slices=not compiles_only)

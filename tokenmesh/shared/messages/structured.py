"""Structured: a grammar that what a model writes must follow, as the engine takes it."""

from tokenmesh.engine.api.structured import (
    CallForm,
    CallForms,
    Structured,
    StructuredKind,
)

__all__ = [
    "CallForm",
    "CallForms",
    "Structured",
    "StructuredKind",
]

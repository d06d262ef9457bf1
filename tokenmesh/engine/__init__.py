"""The engine as a library: no bus, no Redis, no asyncio, nothing of the services."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenmesh.engine.llm import LLM

__all__ = ["LLM"]


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is asked for: most processes import other modules here."""
    if name == "LLM":
        from tokenmesh.engine.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

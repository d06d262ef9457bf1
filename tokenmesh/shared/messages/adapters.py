"""Messages to one worker about LoRA adapters, and what it says of those that it has."""

import msgspec


class AdapterCard(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An adapter of a model, as a worker serves it."""

    name: str
    content_hash: str
    """The hash of its matrices and scalings."""
    created_s: float = 0.0
    """When the worker read it, Unix seconds."""
    is_in_memory: bool = True
    """False: its matrices are read again with the next request."""
    source: str = ""
    """The path or hub id by which it was named, for operators; empty: unknown, or too long."""


class LoadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Read an adapter and serve it. Answered with AdapterLoaded or Failed.

    A repeated one with the same content is answered alike.
    """

    name: str
    path: str = ""
    """A directory on the worker's machine; empty: the one of that name in `lora_dir`."""
    in_place: bool = False
    """Replace another adapter of that name; streams that run keep the one they began with."""
    version: int = 0
    """Orders commands about one name: a higher one counts. Milliseconds since 1970."""


class AdapterLoaded(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The worker takes requests for the adapter."""

    card: AdapterCard
    path: str
    """Resolved."""
    was_there: bool = False
    """It had this very adapter before the command."""


class UnloadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Take no more requests for an adapter; its streams run on. Answered with AdapterUnloaded."""

    name: str
    version: int = 0


class AdapterUnloaded(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The worker does not serve the adapter."""

    was_there: bool = True

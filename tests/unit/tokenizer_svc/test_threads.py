"""Threads keep nothing of a work that has ended."""

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest

from tokenmesh.services.tokenizer_svc.threads import Threads
from tokenmesh.shared.config.model import TokenizerSettings
from tokenmesh.shared.errors import PayloadTooLarge


class Text(str):
    """A text to which there may be a weak reference."""

    __slots__ = ("__weakref__",)


@pytest.fixture
def threads() -> Iterator[Threads]:
    found = Threads(TokenizerSettings())
    gc.collect()
    gc.disable()
    yield found
    gc.enable()
    found.stop()


def _refusing(text: Text) -> Callable[[], None]:
    def refuse() -> None:
        raise PayloadTooLarge(f"{len(text)} characters")

    return refuse


async def _refused(threads: Threads) -> "weakref.ref[Text]":
    text = Text("a" * 100_000)
    with pytest.raises(PayloadTooLarge):
        await threads.run("tenant", len(text), _refusing(text))
    return weakref.ref(text)


async def test_a_text_that_is_refused_is_freed_without_a_collection_of_cycles(
    threads: Threads,
) -> None:
    """Collections are rare: eight texts of a megabyte took hundreds of megabytes until one came."""
    first = await _refused(threads)
    # By then no callback of the first one is to come.
    await threads.run("tenant", 1, lambda: None)
    assert first() is None

"""Real models, by their names in the catalog, for the tests that `make test-real` runs.

They are looked for where `tokenmesh pull` has put them, and a test whose model is not there is
skipped: other tests have an empty cache.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tokenmesh.shared.catalog import CATALOG

_FOLDER = Path(__file__).parent
_CACHE = os.environ.get("XDG_CACHE_HOME")
"""The developer's cache, before the tests have their own."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is in this folder."""
    for item in items:
        if _FOLDER in item.path.parents:
            item.add_marker("real")


@pytest.fixture(scope="module")
def real_cache() -> Iterator[None]:
    """Programs that are started meanwhile find the models that were pulled."""
    with pytest.MonkeyPatch.context() as patch:
        if _CACHE is None:
            patch.delenv("XDG_CACHE_HOME", raising=False)
        else:
            patch.setenv("XDG_CACHE_HOME", _CACHE)
        yield


@pytest.fixture(scope="module")
def checkpoint(real_cache: None) -> Callable[[str], Path]:
    """By the name of a model: its directory or GGUF file. Skips where it was not pulled."""

    def find(name: str) -> Path:
        model = CATALOG[name]
        if not model.is_here:
            pytest.skip(f"{name} is not on this machine: `tokenmesh pull {name}` downloads it")
        return model.checkpoint

    return find

"""Fixtures for tests of the torch engine: tiny checkpoints, made once per session."""

import pytest
import torch

from tests.fakes.models import make_model
from tests.fakes.tiny import Tiny, TinyCheckpoint


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """The checkpoint of a name in tests.fakes.models.FAKES."""
    made: dict[str, TinyCheckpoint] = {}

    def get(name: str) -> TinyCheckpoint:
        if name not in made:
            directory = tmp_path_factory.mktemp(name)
            make_model(name).save_pretrained(directory)
            made[name] = TinyCheckpoint(directory, lambda: make_model(name))
        return made[name]

    return get


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Two threads that spin on a shared machine are slower than one."""
    torch.set_num_threads(1)

"""Fixtures for tests of the torch engine: tiny checkpoints, made once per session."""

from collections.abc import Callable
from functools import cache

import pytest
import torch

from tests.fakes.engine_driver import EngineDriver
from tests.fakes.general_models import GENERAL, VARIANTS, make_general
from tests.fakes.models import make_model
from tests.fakes.tiny import Tiny, TinyCheckpoint


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """The checkpoint of a name in FAKES, GENERAL or VARIANTS of tests.fakes."""

    @cache
    def get(name: str) -> TinyCheckpoint:
        make = make_general if name in {*GENERAL, *VARIANTS} else make_model
        directory = tmp_path_factory.mktemp(name)
        make(name).save_pretrained(directory)
        return TinyCheckpoint(directory, lambda: make(name))

    return get


@pytest.fixture(scope="session")
def general(tiny: Tiny) -> Callable[[str], EngineDriver]:
    """An engine of the general kind on a checkpoint; take `again` of it."""

    @cache
    def get(name: str) -> EngineDriver:
        return EngineDriver(tiny(name).directory, model_impl="transformers", max_num_seqs=9)

    return get


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Two threads that spin on a shared machine are slower than one."""
    torch.set_num_threads(1)

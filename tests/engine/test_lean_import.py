"""xgrammar without the libraries it names: its grammars are the same, its import is shorter."""

import subprocess
import sys

import pytest

PROGRAM = """
import logging, sys
import numpy as np
from tokenmesh.engine.grammar import lean_import
from tokenmesh.engine.grammar.backends import make_backend
from tokenmesh.engine.grammar.token_table import TokenTable
from tokenmesh.shared.messages.structured import Structured

if sys.argv[1] == "another version":
    def broken(module, name):
        raise RuntimeError(name)
    lean_import._Absent.__getattr__ = broken
if sys.argv[1] == "in a worker":
    import torch
backend = make_backend("xgrammar", TokenTable([bytes([each]) for each in range(64)], (0,)))
matcher = backend.load(backend.compile(Structured(kind="regex", text="[0-3]+"))).start()
masks = np.zeros((1, 2), dtype=np.int32)
matcher.fill(masks, 0)
print(masks.tolist(), *sorted({"torch", "transformers"} & sys.modules.keys()))
"""
MASKS = [[0, 0b1111 << 16]]
"""The digits 0 to 3 begin at 48, which is bit 16 of the second word."""


@pytest.mark.parametrize(
    ("case", "loaded"),
    [
        ("in a process of its own", []),
        pytest.param("in a worker", ["torch"], marks=pytest.mark.slow),
        ("another version", ["torch", "transformers"]),
    ],
)
def test_xgrammar_loads_nothing_that_it_can_do_without(case: str, loaded: list[str]) -> None:
    command = (sys.executable, "-c", PROGRAM, case)
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == " ".join([str(MASKS), *loaded])
    assert ("with all it names" in done.stderr) == (case == "another version")

"""Large blocks go back to the system when they are freed."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import sys
import psutil
from tokenmesh.shared.allocator import give_back_freed_memory

if sys.argv[1] == "yes":
    give_back_freed_memory()
process = psutil.Process()
before = process.memory_info().rss
del_me = bytes(b"x" * 2**24)
del del_me
# Blocks of a body's size, each with a small one behind it that stays.
kept, large = [], []
for _ in range(24):
    large.append(b"x" * 2**20)
    kept.append(b"y" * 1000)
del large
print((process.memory_info().rss - before) / 2**20)
"""


def grown_mib(gives_back: str) -> float:
    command = [sys.executable, "-c", PROGRAM, gives_back]
    done = subprocess.run(command, capture_output=True, text=True, timeout=15, check=True)
    return float(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's allocator")
def test_a_process_is_as_small_after_large_blocks_as_before() -> None:
    assert grown_mib("yes") < grown_mib("no") / 2

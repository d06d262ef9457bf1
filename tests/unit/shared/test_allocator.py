"""Large blocks go back to the system when they are freed, and pages of files when asked."""

import mmap
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tokenmesh.shared.allocator import give_back_mapped_pages

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


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux tells what is mapped")
def test_mapped_files_give_back_the_pages_that_nobody_has_written(tmp_path: Path) -> None:
    resident, kept = [], []
    for number in range(2):
        path = tmp_path / f"{number}.weights"
        path.write_bytes(b"a" * 2**20)
        with path.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE)
        assert memory[-1:] == b"a"
        kept.append(memory)
    kept[1][:1] = b"b"
    assert give_back_mapped_pages(".weights") == 1
    smaps = Path("/proc/self/smaps").read_text().split("\n")
    for place, line in enumerate(smaps):
        if line.endswith(".weights"):
            resident.append(next(each.split()[1] for each in smaps[place:] if "Rss:" in each))
    assert sorted(each == "0" for each in resident) == [False, True]
    assert [memory[:2] for memory in kept] == [b"aa", b"ba"]

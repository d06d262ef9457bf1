"""Ctrl-C while the command line is still being imported."""

import signal
import subprocess
import sys

import pytest

# An import that the command needs waits, so that the signal comes in the middle of it.
SLOW_IMPORT = """
import sys, time
from importlib.abc import MetaPathFinder

class Slow(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "tokenmesh.cli.main":
            print("importing", flush=True)
            time.sleep(60)

sys.meta_path.insert(0, Slow())
sys.argv = ["tokenmesh", "up"]
from tokenmesh.__main__ import main
main()
"""


def default_interrupt() -> None:
    """As in a terminal: what runs in the background of a shell may ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.timeout(30)
def test_an_interrupted_import_shows_no_traceback() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_IMPORT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=default_interrupt,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    _, shown = process.communicate()
    assert (process.returncode, shown) == (-signal.SIGINT, "")

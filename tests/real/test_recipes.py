"""The recipe of docs/cookbook.md with three real models, in the memory that it names."""

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.up_memory import pss_of
from tests.e2e.mesh_process import MeshProcess, mesh
from tests.e2e.test_cookbook import PAGE, dense, matches
from tests.fakes.recordings import audio_file, syllables
from tests.servers import free_port

_VOICE = "espeak-ng"
SPREAD = 1.1
"""Pages of libraries count less where other processes map them, too."""
_PAIR = re.compile(r"```bash\n([^`]*)```\n\n```text\n([^`]*)```")


@pytest.fixture(scope="module")
def running(checkpoint: Callable[[str], Path]) -> Iterator[MeshProcess]:
    """`tokenmesh up --demo all`."""
    for name in ("smollm2", "minilm", "whisper-base"):
        checkpoint(name)
    with mesh(free_port(), "--demo", "all") as process:
        yield process


@pytest.mark.timeout(240)
def test_three_real_models_answer_as_the_cookbook_shows_in_the_memory_that_it_names(
    running: MeshProcess, tmp_path: Path
) -> None:
    section = (
        PAGE.read_text("utf-8").partition("## Real models in one mesh\n")[2].partition("\n## ")[0]
    )
    recipes = _PAIR.findall(section)
    if not shutil.which(_VOICE):
        # What is heard in something that only sounds like a voice is not on the page.
        (tmp_path / "question.wav").write_bytes(audio_file(syllables(3)))
        commands = "\n".join(each for each in recipes[2][0].splitlines() if _VOICE not in each)
        recipes[2] = (commands, '{"text": "...", "usage": {"type": "duration", ...}}')
    assert len(recipes) == 3
    for commands, answers in recipes:
        script = f"URL={running.url}\nJSON='Content-Type: application/json'\n{commands}"
        done = subprocess.run(
            ["bash", "-ec", script], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        # as the page shows them, in one line after the other
        shown = "...".join(answers.splitlines())
        assert matches(done.stdout + "\n", shown + "..."), dense(done.stdout)[:1000] + done.stderr
    named = re.search(r"([0-9.]+) GB of memory", section)
    assert named is not None
    assert sum(pss_of(running.process.pid).values()) <= float(named[1]) * 1e9 * SPREAD

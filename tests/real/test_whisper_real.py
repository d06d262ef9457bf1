"""Published Whisper in CTranslate2 directories, compared with faster-whisper.

`WHISPER_PYTHON` names a Python with the packages faster-whisper and espeakng-loader, which are no
requirements of the project; without it the tests are skipped.
"""

import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import pytest_asyncio

from benchmarks.bench_whisper import (
    LONG,
    NAME,
    WINDOW_S,
    FasterWhisper,
    compare,
    different,
    faster_whisper,
    transcribe,
    words,
)
from benchmarks.serve.own_mesh import own_mesh
from benchmarks.speech.clips import Clip, make_clips

PYTHON: Final = os.environ.get("WHISPER_PYTHON", "")
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not PYTHON, reason="WHISPER_PYTHON names no Python with faster-whisper"),
]


@pytest.fixture(scope="module", params=["whisper-tiny", "whisper-base"])
def model(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint(request.param)


@pytest.fixture(scope="module")
def clips(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Clip]:
    made = make_clips(Path(PYTHON), tmp_path_factory.mktemp("clips"))
    # an English-only vocabulary has no empty token
    is_english = "" not in (model / "vocabulary.txt").read_text(encoding="utf-8").split("\n")[:-1]
    return [each for each in made if not is_english or each.language == "en"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    flags = [str(model), "--served-model-name", NAME, "--dtype", "float32"]
    async with own_mesh(flags, {}, tmp_path_factory.mktemp("mesh") / "mesh.log") as found:
        yield found


@pytest.fixture(scope="module")
def peer(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FasterWhisper]:
    log = tmp_path_factory.mktemp("peer") / "peer.log"
    with faster_whisper(Path(PYTHON), model, "float32", 2, log) as found:
        yield found


@pytest.mark.parametrize("timed", [False, True], ids=["text", "timestamps"])
async def test_words_are_those_of_faster_whisper(
    url: str, peer: FasterWhisper, clips: list[Clip], timed: bool
) -> None:
    short = [each for each in clips if each.name != LONG]
    found: Any = await compare(url, peer, short, 1, timed=timed)
    ours, padded, own = (found[name].texts for name in ("mesh", "padded", "own padding"))
    unlike = {
        each.name: (ours[each.name], padded[each.name])
        for each in short
        if words(ours[each.name]) != words(padded[each.name])
    }
    assert not unlike
    assert sum(len(words(ours[each.name])) for each in short) > 4 * len(short)
    wrong, theirs = (
        sum(different(each.spoken, texts[each.name]) for each in short) for texts in (ours, own)
    )
    assert wrong <= theirs, "silence in place of zeros has cost words"


async def test_segments_are_as_likely_as_those_of_faster_whisper(
    url: str, peer: FasterWhisper, clips: list[Clip]
) -> None:
    """It decides whether a text is drawn again, or dropped as made up."""
    unlike = {}
    async with httpx.AsyncClient(timeout=60) as http:
        for clip in clips:
            if clip.name == LONG:
                continue
            answer = await transcribe(url, http, clip, timed=True)
            ours = [each["avg_logprob"] for each in answer["segments"]]
            theirs = peer.ask(clip, WINDOW_S, timed=True).logprobs
            if ours != pytest.approx(theirs, abs=1e-3):
                unlike[clip.name] = ours, theirs
    assert not unlike


async def test_a_long_recording_is_understood_as_well(
    url: str, peer: FasterWhisper, clips: list[Clip]
) -> None:
    (long,) = (each for each in clips if each.name == LONG)
    found = await compare(url, peer, [long], 1, timed=True)
    wrong = {name: sums.wrong_words([long]) for name, sums in found.items()}
    # it is cut at pauses, where faster-whisper goes on from the last timestamp: what is heard next
    # to a cut differs by chance
    assert wrong["mesh"] <= wrong["own padding"] + len(words(long.spoken)) // 100

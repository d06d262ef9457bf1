"""A mesh with Whisper compared with faster-whisper: equal weights and recordings, in turns.

    python -m benchmarks.bench_whisper DIRECTORY --python VENV/bin/python --types default int8

DIRECTORY is that of a Whisper of CTranslate2. `--python` has the packages faster-whisper and
espeakng-loader. Recordings (speech of espeak-ng in four languages, some in noise or quiet, noise,
hiss, silence) and a long one go to both, greedy at temperature 0, to one and then to the other.
Printed are wrong words, words in which the two differ, and seconds of speech a second, of which
the ratio is of this run.

faster-whisper fills a window with zeros of the spectrogram, OpenAI's Whisper and transformers with
silence. So the words are compared for recordings that are padded to 30 s with silence, and its
own padding is a line of its own.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx

from benchmarks.serve.own_mesh import own_mesh
from benchmarks.speech.clips import Clip, make_clips

NAME: Final = "whisper"
WINDOW_S: Final = 30.0
LONG: Final = "long"
_CHILD: Final = Path(__file__).with_name("speech") / "faster_whisper_child.py"
_GREEDY: Final = {"beam_size": 1, "temperature": 0.0, "condition_on_previous_text": False}
_TIMEOUT_S: Final = 300.0


@dataclass
class Sums:
    """The results of one program over all recordings, but the long one for words."""

    texts: dict[str, str] = field(default_factory=dict)
    """By recording."""
    seconds: float = 0.0
    """For all of them."""

    def wrong_words(self, clips: Sequence[Clip]) -> int:
        return sum(different(each.spoken, self.texts[each.name]) for each in clips)


def words(text: str) -> list[str]:
    """Lower case, without punctuation."""
    return re.sub(r"[^\w\s']", " ", text.lower()).split()


def different(one: str, other: str) -> int:
    """Words to be added, removed or changed."""
    first, second = words(one), words(other)
    row = list(range(len(second) + 1))
    for number, word in enumerate(first, 1):
        before, row[0] = row[0], number
        for place, against in enumerate(second, 1):
            changed = before + (word != against)
            before, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, changed)
    return row[-1]


class Heard(NamedTuple):
    """It holds what faster-whisper answers about a recording."""

    text: str
    seconds: float
    logprobs: list[float]
    """By segment: the mean over the tokens of its window."""


class FasterWhisper:
    """A process of the other Python, frozen while it is not asked."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self._answer()
        os.kill(process.pid, signal.SIGSTOP)

    def ask(self, clip: Clip, padded_s: float, *, timed: bool) -> Heard:
        """Raises RuntimeError."""
        own = {"path": str(clip.path), "padded_s": padded_s, "language": clip.language}
        task = {**own, **_GREEDY, "without_timestamps": not timed}
        os.kill(self._process.pid, signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        found = self._answer()
        os.kill(self._process.pid, signal.SIGSTOP)
        return Heard(found["text"], found["seconds"], found["logprobs"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("faster-whisper has ended")
        return dict(json.loads(line))


@contextmanager
def faster_whisper(
    python: Path, model: Path, kind: str, threads: int, log: Path
) -> Iterator[FasterWhisper]:
    """kind: its compute_type."""
    command = [str(python), str(_CHILD), str(model), kind, str(threads)]
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        try:
            yield FasterWhisper(process)
        finally:
            process.kill()


async def transcribe(url: str, http: httpx.AsyncClient, clip: Clip, *, timed: bool) -> Any:
    """The mesh's answer. Raises RuntimeError."""
    data = {"model": NAME, "language": clip.language, "temperatures[]": "0"}
    data["response_format"] = "verbose_json" if timed else "json"
    file = {"file": (clip.path.name, clip.path.read_bytes())}
    found = await http.post(f"{url}/v1/audio/transcriptions", data=data, files=file)
    if found.status_code != 200:
        raise RuntimeError(found.text)
    return found.json()


async def compare(
    url: str, peer: FasterWhisper, clips: Sequence[Clip], rounds: int, *, timed: bool
) -> dict[str, Sums]:
    """`mesh`, `padded` and `own padding`, each recording by one after the other.

    Of each recording the fastest round counts.
    """
    found = {"mesh": Sums(), "padded": Sums(), "own padding": Sums()}
    best: dict[tuple[str, str], float] = {}
    async with httpx.AsyncClient(timeout=_TIMEOUT_S) as http:
        for _ in range(rounds):
            for clip in clips:
                began_s = time.perf_counter()
                answer = await transcribe(url, http, clip, timed=timed)
                text = str(answer["text"]).strip()
                answers = {"mesh": (text, time.perf_counter() - began_s)}
                answers["padded"] = peer.ask(clip, WINDOW_S, timed=timed)[:2]
                answers["own padding"] = peer.ask(clip, 0, timed=timed)[:2]
                for name, (text, took_s) in answers.items():
                    found[name].texts[clip.name] = text
                    key = name, clip.name
                    best[key] = min(best.get(key, took_s), took_s)
    for (name, _), took_s in best.items():
        found[name].seconds += took_s
    return found


def report(found: dict[str, Sums], clips: Sequence[Clip], *, timed: bool) -> Iterator[str]:
    """Lines of a table."""
    short = [each for each in clips if each.name != LONG]
    speech_s = sum(each.seconds for each in clips)
    num_words = sum(len(words(each.spoken)) for each in short)
    mesh = found["mesh"]
    yield f"{'with' if timed else 'without'} timestamps, {num_words} words in {len(short)} clips"
    for name, sums in found.items():
        between = sum(different(sums.texts[each.name], mesh.texts[each.name]) for each in short)
        yield (
            f"  {name:12} {sums.wrong_words(short):4} wrong, {between:4} unlike the mesh, "
            f"{speech_s / sums.seconds:6.1f} s of speech a second, "
            f"mesh is {sums.seconds / mesh.seconds:.2f}x"
        )
    for clip in short:
        if found["padded"].texts[clip.name] != mesh.texts[clip.name]:
            yield f"  {clip.name}: {mesh.texts[clip.name]!r} | {found['padded'].texts[clip.name]!r}"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, prog="bench_whisper", formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("model", type=Path)
    add("--python", type=Path, required=True, help="with faster-whisper and espeakng-loader")
    add("--types", nargs="+", default=["default", "int8"], help="compute types of faster-whisper")
    add("--dtypes", nargs="+", default=["float32", "auto"], help="dtypes of the mesh")
    add("--languages", nargs="+", default=["en", "de", "fr", "es"])
    add("--threads", type=int, default=2)
    add("--rounds", type=int, default=3, help="the best round of each recording counts")
    add("--timestamps", choices=("without", "with"), nargs="+", default=["without"])
    return parser.parse_args(arguments)


async def run(options: argparse.Namespace, folder: Path) -> None:
    """Print all tables."""
    made = make_clips(options.python, folder)
    clips = [each for each in made if each.language in options.languages]
    environment = {"OMP_NUM_THREADS": str(options.threads)}
    for dtype in options.dtypes:
        flags = [str(options.model), "--served-model-name", NAME, "--dtype", dtype]
        async with own_mesh(flags, environment, folder / "mesh.log") as url:
            for kind in options.types:
                log = folder / "faster-whisper.log"
                with faster_whisper(
                    options.python, options.model, kind, options.threads, log
                ) as peer:
                    for choice in options.timestamps:
                        timed = choice == "with"
                        found = await compare(url, peer, clips, options.rounds, timed=timed)
                        print(f"mesh {dtype}, faster-whisper {kind}, ", end="")
                        print("\n".join(report(found, clips, timed=timed)), flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run and print."""
    options = parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(options, Path(folder)))


if __name__ == "__main__":
    main(sys.argv[1:])

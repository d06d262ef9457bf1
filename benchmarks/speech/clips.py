"""Recordings: speech in four languages, in noise or quiet, noise, hiss, silence; a long one."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy
import soundfile

RATE: Final = 16000
SENTENCES: Final = {
    "en": (
        "The committee will meet on Thursday morning to discuss the new budget.",
        "Please leave your umbrella at the door before you enter the museum.",
        "Our train arrived twenty minutes late because of heavy snow in the mountains.",
        "She bought three loaves of bread, a bottle of milk and some green apples.",
    ),
    "de": (
        "Der Ausschuss trifft sich am Donnerstag, um den neuen Haushalt zu besprechen.",
        "Bitte lassen Sie Ihren Regenschirm an der Tür, bevor Sie das Museum betreten.",
        "Unser Zug kam wegen des starken Schneefalls zwanzig Minuten zu spät an.",
        "Sie kaufte drei Brote, eine Flasche Milch und einige grüne Äpfel.",
    ),
    "fr": (
        "Le comité se réunira jeudi matin pour discuter du nouveau budget.",
        "Veuillez laisser votre parapluie à la porte avant d'entrer dans le musée.",
        "Notre train est arrivé avec vingt minutes de retard à cause de la neige.",
        "Elle a acheté trois pains, une bouteille de lait et des pommes vertes.",
    ),
    "es": (
        "El comité se reunirá el jueves por la mañana para discutir el nuevo presupuesto.",
        "Por favor, deje su paraguas en la puerta antes de entrar en el museo.",
        "Nuestro tren llegó veinte minutos tarde a causa de la nieve en las montañas.",
        "Ella compró tres panes, una botella de leche y unas manzanas verdes.",
    ),
}
_NOISE: Final = 0.02
"""Its standard deviation; speech has peaks near 0.5."""
_QUIET: Final = 0.003
_HISS: Final = 0.001
_PAUSE_S: Final = 0.6


@dataclass(frozen=True, slots=True)
class Clip:
    """One recording."""

    name: str
    path: Path
    language: str
    spoken: str
    """The words that are said in it; empty: none."""
    seconds: float


def make_clips(python: Path, folder: Path) -> list[Clip]:
    """Write all files; the last one is the long recording. Needs espeakng-loader in `python`.

    Raises RuntimeError.
    """
    spoken = _speak(python, folder)
    random = numpy.random.default_rng(1)
    found = [
        _written(folder, f"{language}-{number}", language, text, spoken[language, number])
        for language, texts in SENTENCES.items()
        for number, text in enumerate(texts)
    ]
    for language in ("en", "de"):
        samples = spoken[language, 0]
        noisy = samples + _NOISE * random.standard_normal(len(samples))
        found.append(
            _written(folder, f"{language}-in-noise", language, SENTENCES[language][0], noisy)
        )
    quiet = _QUIET * spoken["en", 0]
    found.append(_written(folder, "en-quiet", "en", SENTENCES["en"][0], quiet))
    nothing = {"noise": _NOISE * random.standard_normal(6 * RATE), "silence": numpy.zeros(6 * RATE)}
    nothing["hiss"] = _HISS * random.standard_normal(8 * RATE)
    found += [_written(folder, name, "en", "", samples) for name, samples in nothing.items()]
    pause = numpy.zeros(int(_PAUSE_S * RATE))
    sentences = [*SENTENCES["en"]] * 4
    parts = [spoken["en", number % 4] for number in range(len(sentences))]
    long = numpy.concatenate([each for part in parts for each in (part, pause)])
    return [*found, _written(folder, "long", "en", " ".join(sentences), long)]


def _speak(python: Path, folder: Path) -> dict[tuple[str, int], numpy.ndarray]:
    wanted = {
        (language, number): (text, folder / f"spoken-{language}-{number}.wav")
        for language, texts in SENTENCES.items()
        for number, text in enumerate(texts)
    }
    lines = [
        json.dumps({"voice": language, "text": text, "path": str(path)})
        for (language, _), (text, path) in wanted.items()
    ]
    done = subprocess.run(
        [str(python), str(Path(__file__).with_name("espeak.py"))],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        timeout=60,
    )
    if done.returncode:
        raise RuntimeError(f"espeak-ng does not speak:\n{done.stderr[-2000:]}")
    return {key: _samples(path) for key, (_, path) in wanted.items()}


def _samples(path: Path) -> numpy.ndarray:
    """At the rate of Whisper, so that no two resamplers are compared."""
    import soxr

    samples, rate = soundfile.read(path, dtype="float32")
    return numpy.asarray(soxr.resample(samples, rate, RATE))


def _written(folder: Path, name: str, language: str, spoken: str, samples: numpy.ndarray) -> Clip:
    path = folder / f"{name}.wav"
    soundfile.write(path, samples.clip(-1, 1), RATE, subtype="PCM_16")
    return Clip(name, path, language, spoken, len(samples) / RATE)

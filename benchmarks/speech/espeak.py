"""Speech of espeak-ng as a library: `python benchmarks/speech/espeak.py` speaks lines of JSON.

The Python that runs it has the package espeakng-loader, and need not have those of TokenMesh.
A line {"voice": "de", "text": "...", "path": "speech.wav"} becomes a WAV file; the answer is {}.
"""

import ctypes
import json
import sys
import wave
from typing import Any

_SYNCHRONOUS = 2
"""Samples are handed to a callback, and none are played."""
_UTF8 = 1
_HEARD = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p
)


class Espeak:
    """One voice at a time."""

    def __init__(self) -> None:
        import espeakng_loader  # type: ignore[import-not-found]

        self._library: Any = ctypes.CDLL(espeakng_loader.get_library_path())
        data = espeakng_loader.get_data_path().encode()
        self.rate: int = self._library.espeak_Initialize(_SYNCHRONOUS, 0, data, 0)
        self._samples = bytearray()
        self._hear = _HEARD(self._heard)  # the library keeps no reference
        self._library.espeak_SetSynthCallback(self._hear)

    def speak(self, voice: str, text: str, path: str) -> None:
        """Write a file of 16 bits, mono."""
        if self._library.espeak_SetVoiceByName(voice.encode()):
            raise ValueError(f"espeak-ng has no voice {voice}")
        self._samples.clear()
        encoded = text.encode()
        self._library.espeak_Synth(encoded, len(encoded) + 1, 0, 0, 0, _UTF8, None, None)
        self._library.espeak_Synchronize()
        with wave.open(path, "wb") as file:
            file.setparams((1, 2, self.rate, 0, "NONE", ""))
            file.writeframes(bytes(self._samples))

    def _heard(self, samples: Any, count: int, _events: Any) -> int:
        if samples and count > 0:
            self._samples += ctypes.string_at(samples, 2 * count)
        return 0


if __name__ == "__main__":
    espeak = Espeak()
    for line in sys.stdin:
        espeak.speak(**json.loads(line))
        print("{}", flush=True)

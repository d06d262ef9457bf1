"""Speech: samples that arrive while they are transcribed."""

import asyncio
import io
import wave
from dataclasses import dataclass, field
from typing import Final

BYTES_PER_SAMPLE: Final = 2


@dataclass(slots=True)
class Speech:
    """Samples of 16 bits, little-endian, mono. The caller bounds how many there are."""

    rate: int
    is_over: bool = False
    _data: bytearray = field(default_factory=bytearray)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def num_samples(self) -> int:
        """Samples that have arrived."""
        return len(self._data) // BYTES_PER_SAMPLE

    def append(self, data: bytes) -> None:
        """Take samples that have arrived."""
        self._data += data
        self._changed.set()

    def end(self, whole: bytes) -> None:
        """It is over; `whole`: all its samples."""
        self._data = bytearray(whole)
        self.is_over = True
        self._changed.set()

    def read(self, first: int, end: int) -> bytes:
        """The samples [first, end)."""
        return bytes(self._data[first * BYTES_PER_SAMPLE : end * BYTES_PER_SAMPLE])

    async def wait(self, num_samples: int) -> bool:
        """Wait until there are so many samples, or the speech is over; whether there are.

        The session of the speech ends the wait, which has a time limit.
        """
        while self.num_samples < num_samples and not self.is_over:
            self._changed.clear()
            await self._changed.wait()
        return self.num_samples >= num_samples


def wav_of(audio: bytes, rate: int) -> bytes:
    """A WAV file of samples of one channel."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(BYTES_PER_SAMPLE)
        writer.setframerate(rate)
        writer.writeframes(audio)
    return file.getvalue()

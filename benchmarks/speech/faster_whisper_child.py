"""faster-whisper, asked in lines of JSON: `python faster_whisper_child.py MODEL TYPE THREADS`.

The Python that runs it has faster-whisper, and need not have the packages of TokenMesh. It answers
a line of a path and options of `transcribe` with the text, the language, the mean log-probability
of each segment and the seconds it took.
"""

import json
import sys
import time

import numpy
from faster_whisper import WhisperModel, decode_audio  # type: ignore[import-not-found]

_RATE = 16000


def main(model: str, compute_type: str, threads: str) -> None:
    """Load and answer."""
    whisper = WhisperModel(model, device="cpu", compute_type=compute_type, cpu_threads=int(threads))
    print("{}", flush=True)
    for line in sys.stdin:
        options = json.loads(line)
        began_s = time.perf_counter()
        samples = decode_audio(options.pop("path"))
        missing = int(options.pop("padded_s", 0) * _RATE) - len(samples)
        samples = numpy.pad(samples, (0, max(0, missing)))
        growing, info = whisper.transcribe(samples, **options)
        segments = list(growing)
        text = "".join(each.text for each in segments).strip()
        took_s = time.perf_counter() - began_s
        answer = {"text": text, "language": info.language, "seconds": took_s}
        answer["logprobs"] = [each.avg_logprob for each in segments]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""TextStream: the text of a recording while its transcripts grow."""

from dataclasses import dataclass

from tokenmesh.services.gateway.audio.clip_passes import Recording
from tokenmesh.services.gateway.audio.segments import Transcript, text_ids
from tokenmesh.shared.text import Detokenizer, make_detokenizer


@dataclass(slots=True)
class TextStream:
    recording: Recording
    text: str = ""
    _detokenizer: Detokenizer | None = None
    _num_read: int = 0
    _clip: Transcript | None = None

    def push(self, transcript: Transcript, is_done: bool) -> str:
        """What is new; without white space before the first word."""
        recording = self.recording
        if transcript is not self._clip or self._detokenizer is None:
            self._clip, self._num_read = transcript, 0
            self._detokenizer = make_detokenizer(recording.text.vocabulary, ())
        new = transcript.token_ids[self._num_read :]
        self._num_read = len(transcript.token_ids)
        delta = self._detokenizer.push(text_ids(new, recording.task.facts))
        if is_done:
            delta += self._detokenizer.finish()
        if not self.text:
            delta = delta.lstrip()
        self.text += delta
        return delta

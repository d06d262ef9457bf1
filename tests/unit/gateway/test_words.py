"""Words of transcripts are those of transformers."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer
from transformers.models.whisper.tokenization_whisper import _collate_word_timestamps

from tests.fakes.whisper import END, FIRST_TIME, whisper
from tokenmesh.services.gateway.apis.audio.segments import Transcript, words_of
from tokenmesh.shared.ids import BlobKey
from tokenmesh.shared.messages.audio import AudioClip, SpeechFacts

TEXTS = [
    " The quick brown fox, over the lazy dog.",
    ' He said: "no way!" (quietly) - then left...',
    "Grüße aus Köln, naïve café",
    " 你好世界 🙂 fox",
    " ¿Qué? ¡Sí! 3.50",
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whisper(tmp_path_factory.mktemp("whisper"))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(("code", "name"), [("en", "english"), ("zh", "chinese")])
def test_words_are_divided_as_by_transformers(
    directory: Path, text: str, code: str, name: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = tokenizer.encode(text, add_special_tokens=False)
    clip = AudioClip(start_s=10.0, end_s=14.0, content_hash="h", features=BlobKey("f"))
    ends = [3 * place + 2 for place in range(len(ids) + 2)]
    transcript = Transcript(clip, [FIRST_TIME, *ids, FIRST_TIME + 150], token_ends=ends)
    facts = SpeechFacts(start_id=END + 1, end_id=END, first_timestamp_id=FIRST_TIME)
    found = words_of(transcript, facts, tokenizer.decode, code)
    times = [0.02 * end for end in ends]
    pairs = [(times[place], times[place + 1]) for place in range(len(ids))]
    expected = _collate_word_timestamps(tokenizer, ids, pairs, name, False)
    texts = [each["text"].strip() for each in expected]
    assert [word.text for word in found] == [each for each in texts if each]
    ours = [(word.start_s - 10.0, word.end_s - 10.0) for word in found]
    theirs = [each["timestamp"] for each in expected if each["text"].strip()]
    assert ours == [pytest.approx(each, abs=1e-6) for each in theirs]

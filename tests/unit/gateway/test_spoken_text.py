"""The words that were said are found in answers that say more."""

import random

import pytest

from tokenmesh.services.gateway.apis.audio.spoken_text import SpokenText, gap_between, spoken
from tokenmesh.shared.messages.audio import SpeechFacts

NAMES = {"en": "English", "zh": "Chinese"}
MARKED = SpeechFacts(start_id=-1, embed_id=3, marker="<asr_text>", language_names=NAMES)
FRAMED = SpeechFacts(start_id=-1, embed_id=3, is_framed=True)
PLAIN = SpeechFacts(start_id=-1, embed_id=3)
CASES = [
    (MARKED, "language English<asr_text>Hello there.", "Hello there.", "en"),
    (MARKED, " language chinese<asr_text>你好", "你好", "zh"),
    (MARKED, "language None<asr_text>", "", None),
    (MARKED, "language Klingon<asr_text>x<asr_text>y", "x<asr_text>y", None),
    (MARKED, "Hello there, no marker", "Hello there, no marker", None),
    (MARKED, "language is a gift", "language is a gift", None),
    (MARKED, "language " + "is a gift " * 20, "language " + "is a gift " * 20, None),
    (MARKED, "", "", None),
    (FRAMED, 'The spoken content of the audio is "One, two.".', "One, two.", None),
    (FRAMED, "The transcription of the audio is 'it''s'.", "it''s", None),
    (FRAMED, "The content of the input audio is: yes", "yes", None),
    (FRAMED, 'He said "yes".', 'He said "yes".', None),
    (FRAMED, "The spoken word", "The spoken word", None),
    (FRAMED, "The spoken content of the audio is", "", None),
    (PLAIN, 'language English<asr_text>"a".', 'language English<asr_text>"a".', None),
]


@pytest.mark.parametrize(("facts", "answer", "expected", "language"), CASES)
def test_markers_are_stripped_however_the_answer_arrives(
    facts: SpeechFacts, answer: str, expected: str, language: str | None
) -> None:
    assert spoken(answer, facts) == expected
    for seed in range(20):
        draw, said, text, at = random.Random(seed), SpokenText(facts), "", 0
        while at < len(answer):
            end = at + draw.randint(1, 6)
            text += said.push(answer[at:end])
            assert expected.startswith(text)
            at = end
        assert text + said.finish() == expected
        assert said.language == language


def test_a_transcript_is_not_held_back_for_long() -> None:
    said = SpokenText(MARKED)
    assert said.push("Hel") == "Hel"
    said = SpokenText(MARKED)
    assert said.push("language English<asr_text>H") == "H"
    assert said.push("i") == "i"


@pytest.mark.parametrize(
    ("before", "after", "gap"),
    [
        ("One.", "Two.", " "),
        ("One. ", "Two.", ""),
        ("你好。", "再见", ""),
        ("さくら", "カナ", ""),
        ("안녕", "하세요", " "),
        ("สวัสดี", "ครับ", ""),
        ("你好", "Hello", " "),
        ("", "x", ""),
    ],
)
def test_clips_are_joined_as_their_script_divides_words(before: str, after: str, gap: str) -> None:
    assert gap_between(before, after) == gap

"""`bench serve` with recordings: what is sent, what is read, and the numbers of speech."""

import asyncio
import json
import wave
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from email import message_from_bytes
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.fakes.scripted_http import DONE, event, plain, stream
from tokenmesh.cli.bench.load import Outcome
from tokenmesh.cli.bench.recordings import RecordingFile, edit_distance, recordings
from tokenmesh.cli.bench.report import summarize, words_of
from tokenmesh.cli.main import MISUSE, run

USAGE = {"type": "tokens", "input_tokens": 7, "output_tokens": 3, "total_tokens": 10}
OPENAI = (
    event({"type": "transcript.text.delta", "delta": "Hello, "}),
    event({"type": "transcript.text.delta", "delta": "word"}),
    event({"type": "transcript.text.done", "text": "Hello, word", "usage": USAGE}),
)
VLLM = (
    event({"choices": [{"delta": {"content": "Hello, "}}]}),
    event({"choices": [{"delta": {"content": "word"}, "finish_reason": "stop"}]}),
    event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}),
    DONE,
)


def write_wav(path: Path, seconds: float) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(bytes(int(16000 * seconds)))
    return path


@asynccontextmanager
async def transcribing(reply: bytes) -> AsyncIterator[tuple[str, list[dict[str, bytes]]]]:
    """The URL of a server, and the fields of the forms that it receives with their path."""
    forms: list[dict[str, bytes]] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            line, _, headers = head.partition(b"\r\n")
            message = message_from_bytes(headers)
            body = await reader.readexactly(int(message["Content-Length"]))
            if line.startswith(b"GET"):
                writer.write(plain(200, {"data": [{"id": "demo"}]}))
                continue
            parts: Any = message_from_bytes(headers + body).get_payload()
            fields = {"path": line.split()[1]}
            for part in parts:
                name = part.get_param("name", header="content-disposition")
                fields[name] = part.get_payload(decode=True)
                fields["filename"] = str(part.get_filename()).encode()
            forms.append(fields)
            writer.write(reply)

    async def ignoring_the_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handle(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async with await asyncio.start_server(ignoring_the_end, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", forms


async def bench(url: str, *arguments: str) -> int:
    line = ("serve", "--base-url", url, "--backend", "openai-audio", "--dataset-name", "custom")
    return await asyncio.to_thread(run, ["bench", *line, "--num-warmups", "0", *arguments])


@pytest.mark.parametrize("events", [OPENAI, VLLM], ids=["openai", "vllm"])
async def test_recordings_are_measured_in_both_dialects(
    events: Sequence[bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sound = write_wav(tmp_path / "speech" / "one.wav", 1.5)
    sound.with_suffix(".txt").write_text("hello, World!\n")
    out = tmp_path / "run.json"
    async with transcribing(stream(events)) as (url, forms):
        path = ("--dataset-path", str(sound.parent), "--result", str(out))
        assert await bench(url, "--num-prompts", "4", "--max-concurrency", "2", *path) == 0
    assert len(forms) == 4
    assert forms[0] == {
        "path": b"/v1/audio/transcriptions",
        "model": b"demo",
        "temperature": b"0",
        "stream": b"true",
        "stream_include_usage": b"true",
        "file": sound.read_bytes(),
        "filename": b"one.wav",
    }
    found = json.loads(out.read_text())["results"]
    assert (found["completed"], found["output_tokens"], found["audio_s"]) == (4, 12, 6.0)
    assert found["word_error_rate"] == 0.5
    assert found["rtfx"] == pytest.approx(6.0 / found["duration_s"], rel=0.2)
    assert found["ttft_ms"]["mean"] > 0
    shown = capsys.readouterr().err
    assert "RTFx" in shown
    assert "50.00%" in shown


async def test_a_list_names_language_and_length_and_the_endpoint_may_be_another(
    tmp_path: Path,
) -> None:
    (tmp_path / 'a "b".m4a').write_bytes(b"no sound that is read here")
    path = tmp_path / "list.jsonl"
    path.write_text(json.dumps({"audio": 'a "b".m4a', "duration": 3.0, "language": "de"}) + "\n\n")
    out = tmp_path / "run.json"
    more = ("--dataset-path", str(path), "--endpoint", "/v1/audio/translations")
    async with transcribing(stream(OPENAI)) as (url, forms):
        assert await bench(url, "--num-prompts", "1", *more, "--result", str(out)) == 0
    assert (forms[0]["path"], forms[0]["language"]) == (b"/v1/audio/translations", b"de")
    assert forms[0]["filename"] == b'a "b".m4a'
    found = json.loads(out.read_text())["results"]
    assert found["audio_s"] == 3.0
    assert "word_error_rate" not in found


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (stream(OPENAI[:2]), "truncated"),
        (stream((VLLM[0], DONE)), "no_usage"),
        (stream((event({"error": {"code": "overloaded"}}),)), "stream_overloaded"),
        (stream((b'data: {"delta": 3}\n\n',)), "hung_up"),
        (plain(400, {"error": {"message": "no audio"}}), "http_400"),
    ],
)
async def test_a_transcript_that_fails_is_an_error_by_its_kind(
    reply: bytes, kind: str, tmp_path: Path
) -> None:
    write_wav(tmp_path / "one.wav", 0.5)
    out = tmp_path / "run.json"
    more = ("--num-prompts", "1", "--dataset-path", str(tmp_path), "--result", str(out))
    async with transcribing(reply) as (url, _):
        assert await bench(url, *more) == 1
    found = json.loads(out.read_text())["results"]
    assert (found["errors"], found["rtfx"]) == ({kind: 1}, 0.0)


def test_references_of_librispeech_are_read_and_recordings_come_again(tmp_path: Path) -> None:
    for name in ("1-2", "1-3"):
        write_wav(tmp_path / "1" / f"{name}.wav", 0.25)
    (tmp_path / "1" / "1.trans.txt").write_text("1-2 AND SO\n1-3 IT WAS\n")
    found = recordings(tmp_path, 5, Random(0))
    assert {(each.name, each.reference) for each in found} == {
        ("1-2.wav", "AND SO"),
        ("1-3.wav", "IT WAS"),
    }
    assert (len(found), found[0].duration_s, found[0]) == (5, 0.25, found[2])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"audio": "there.wav"', "list.jsonl: line 1 is not a recording"),
        ('\n{"text": "x"}', "list.jsonl: line 2 is not a recording: `audio` is missing"),
        ('{"audio": 3}', "line 1 is not a recording"),
        ('{"audio": "x.wav", "duration": 0}', "line 1: duration 0.0: above 0"),
        ('{"audio": "nowhere.wav"}', "nowhere.wav: No such file"),
        ('{"audio": "list.jsonl"}', "list.jsonl: its length is not known"),
        ("", "holds no recording"),
    ],
)
async def test_a_list_that_cannot_be_read_is_a_sentence(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "list.jsonl"
    path.write_text(content)
    assert await bench("http://x", "--model", "demo", "--dataset-path", str(path)) == MISUSE
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--backend openai-audio", "--dataset-name custom"),
        (
            "--backend openai-audio --dataset-name sharegpt --dataset-path .",
            "--dataset-name custom",
        ),
        ("--backend openai-audio --endpoint /v1/completions", "transcriptions or translations"),
        ("--backend openai --endpoint v1/completions", "--endpoint v1/completions"),
        ("--dataset-name custom --dataset-path .", "no such file"),
    ],
)
async def test_options_that_do_not_go_together_are_a_sentence(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await asyncio.to_thread(run, ["bench", "serve", *line.split()]) == MISUSE
    assert message in " ".join(capsys.readouterr().err.split())


def plain_distance(one: Sequence[str], other: Sequence[str]) -> int:
    row = list(range(len(other) + 1))
    for number, word in enumerate(one, 1):
        above, row = row, [number]
        for at, each in enumerate(other):
            row.append(min(row[-1] + 1, above[at + 1] + 1, above[at] + (word != each)))
    return row[-1]


def test_the_distance_is_that_of_the_textbook() -> None:
    random = Random(5)
    for _ in range(300):
        one, other = (random.choices("abcd", k=random.randrange(12)) for _ in range(2))
        assert edit_distance(one, other) == plain_distance(one, other), (one, other)


def test_words_have_no_case_and_no_punctuation() -> None:
    assert words_of("It\u2019s 3 O'Clock \u2014 \uff21bc!") == ["it's", "3", "o'clock", "abc"]
    assert words_of("\u4eca\u65e5\u306f ok") == ["\u4eca", "\u65e5", "\u306f", "ok"]


def test_word_errors_are_over_all_words_of_good_requests() -> None:
    def outcome(reference: str | None, text: str, error: str | None = None) -> Outcome:
        recording = RecordingFile("a", b"", 4.0, reference)
        return Outcome(0.0, 2.0, [1.0], 1, 1, error, recording, text)

    found = summarize(
        [
            outcome("a b c", "a x c d"),
            outcome("d", "d"),
            outcome(None, "x"),
            outcome("a", "", "timeout"),
        ]
    )
    assert (found["audio_s"], found["rtfx"], found["word_error_rate"]) == (12.0, 6.0, 0.5)
    assert "rtfx" not in summarize([Outcome(0.0, 2.0, [1.0], 1, 1)])

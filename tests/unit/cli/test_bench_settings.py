"""`bench sweep` over settings of the load, `bench startup` as JSON, and files that are damaged."""

import asyncio
import json
from pathlib import Path

import pytest

from tests.fakes.scripted_http import GOOD, plain, serving, stream
from tokenmesh.cli.bench import commands
from tokenmesh.cli.bench.startup import Starts
from tokenmesh.cli.main import MISUSE, run

SWEEP = ("sweep", "--goodput", "ttft:60000", "--num-prompts", "2", "--num-warmups", "0")


async def command(*arguments: str) -> int:
    """The exit code of `tokenmesh bench`, which runs an event loop of its own."""
    return await asyncio.to_thread(run, ["bench", *arguments])


async def test_a_sweep_varies_the_settings_of_its_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenmesh.cli.bench.sweep._MAX_RUNS", 1)
    lengths: list[tuple[int, object]] = []

    def answer(path: str, body: dict[str, object]) -> bytes:
        if path == "/v1/models":
            return plain(200, {"data": [{"id": "demo"}]})
        if path == "/tokenize":
            return plain(200, {"tokens": [1, 2, 3]})
        if path == "/metrics":
            return plain(404, {})
        prompt = body["prompt"]
        assert isinstance(prompt, list)
        lengths.append((len(prompt), body["max_tokens"]))
        return stream(GOOD)

    settings = tmp_path / "settings.json"
    entries = [
        {"random_input_len": 7, "random-output-len": 3, "max_concurrency": 1},
        {"_benchmark_name": "long", "random_input_len": 40, "ignore_eos": False},
    ]
    settings.write_text(json.dumps(entries))
    history = tmp_path / "deep" / "history.jsonl"
    async with serving(answer) as url:
        line = (*SWEEP, "--base-url", url, "--start-rate", "900", "--random-output-len", "9")
        files = ("--bench-params", str(settings), "--history", str(history))
        assert await command(*line, *files) == 0
    assert lengths == [(7, 3)] * 2 + [(40, 9)] * 2
    assert capsys.readouterr().out.splitlines() == [
        "random_input_len=7, random-output-len=3, max_concurrency=1: 900 requests/s",
        "long: 900 requests/s",
    ]
    points = [json.loads(each) for each in history.read_text().splitlines()]
    assert [each["config"]["max_concurrency"] for each in points] == [1, 64]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", "not a JSON list of settings"),
        ("[]", "holds no settings"),
        ('[{"request_rate": 3}]', "request_rate is not an option"),
        ('[{"api_key": "x"}]', "api_key is not an option"),
        ('[{}, {"max_concurrency": 0}]', "entry 2: max_concurrency: 0 is below 1"),
        ('[{"max_concurrency": "8"}]', "Expected `int`"),
        ('[{"seed": 1}, {"seed": 1}]', "two settings"),
        ('{"a": {"backend": "tgi"}}', "--backend tgi"),
    ],
)
async def test_settings_that_cannot_be_are_a_sentence(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "settings.json"
    path.write_text(content)
    assert await command(*SWEEP, "--bench-params", str(path)) == MISUSE
    shown = " ".join(capsys.readouterr().err.split())
    assert message in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize("content", [b'{"rate": 1.0, "met"', b"\xff\xfe", b"[1]", b'{"rate": 1}'])
async def test_a_damaged_history_is_called_by_its_name_and_line(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "history.jsonl"
    path.write_bytes(b"\n" + content + b"\n")
    assert await command(*SWEEP, "--history", str(path)) == MISUSE
    assert "history.jsonl: line 2" in capsys.readouterr().err.replace("\n", "")


@pytest.mark.parametrize("content", ["[1]", '[{"conversations": [1]}]', "[", '{"prompt"'])
async def test_a_damaged_data_set_is_called_by_its_name(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts.json"
    path.write_text(content)
    line = f"serve --model demo --dataset-name custom --dataset-path {path}"
    assert await command(*line.split()) == MISUSE
    assert "prompts.json" in capsys.readouterr().err.replace("\n", "")


@pytest.mark.parametrize(
    "line",
    ["serve --result", "serve --plot", "sweep --goodput ttft:1 --history", "startup --result"],
)
async def test_a_file_that_cannot_be_written_is_refused_before_the_measurement(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await command(*line.split(), str(tmp_path)) == MISUSE
    assert f"{line.split()[-1]} {tmp_path}" in capsys.readouterr().err.replace("\n", "")
    (tmp_path / "file").touch()
    assert await command(*line.split(), str(tmp_path / "file" / "below.json")) == MISUSE


@pytest.mark.parametrize("flag", ["--result", "--output-json"])
def test_starts_are_written_as_json(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(words: object, rounds: int) -> Starts:
        assert words == ["some/model", "--gateway.api-keys=secret"]
        return Starts([1.5] * rounds, [2.5] * rounds)

    monkeypatch.setattr(commands, "measure_starts", measure)
    path = tmp_path / "startup.json"
    line = ["startup", "some/model", "--gateway.api-keys=secret", "--rounds", "2", flag, str(path)]
    assert run(["bench", *line]) == 0
    assert json.loads(path.read_text()) == {
        "config": {"model": "some/model", "rounds": 2},
        "results": {"ready_s": [1.5, 1.5], "token_s": [2.5, 2.5]},
    }

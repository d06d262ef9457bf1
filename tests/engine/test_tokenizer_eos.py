"""The tokens of the configuration end a text, and the tokenizer's own."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.engine_driver import EngineDriver, Job, greedy
from tests.fakes.grammars import VOCAB, make_checkpoint
from tokenmesh.engine.models.raw_config import read_json
from tokenmesh.engine.models.token_ids import read_eos
from tokenmesh.services.worker_svc.loaded import load_sim
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import CheckpointError
from tokenmesh.shared.messages.sampling import SamplingParams

CONFIGURED = 2
END = "<|im_end|>"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Its configuration says 2, whatever the tokenizer says."""
    directory = make_checkpoint(tmp_path)
    (directory / "generation_config.json").unlink(missing_ok=True)
    return directory


def write(directory: Path, name: str, **values: Any) -> None:
    (directory / name).write_text(json.dumps(values))


def add_end(directory: Path, token_id: int) -> None:
    """Makes END an added token, and nothing else."""
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    kept = [each for each in tokenizer["added_tokens"] if each["content"] != END]
    tokenizer["added_tokens"] = [*kept, {**kept[0], "id": token_id, "content": END}]
    path.write_text(json.dumps(tokenizer))


def eos_of(directory: Path, **settings: Any) -> frozenset[int]:
    model = ModelSettings(model=str(directory), **settings)
    return read_eos(read_json(directory / "config.json"), directory, model, VOCAB)


@pytest.mark.parametrize(
    ("name", "token"),
    [
        ("tokenizer_config.json", END),
        ("tokenizer_config.json", {"content": END, "special": True}),
        ("special_tokens_map.json", END),
        ("special_tokens_map.json", {"content": END, "lstrip": False}),
    ],
)
def test_the_tokenizers_end_token_ends_a_text_too(
    checkpoint: Path, name: str, token: object
) -> None:
    add_end(checkpoint, 300)
    write(checkpoint, "tokenizer_config.json")
    write(checkpoint, name, eos_token=token)
    assert eos_of(checkpoint) == {CONFIGURED, 300}
    write(checkpoint, "generation_config.json", eos_token_id=[7, 9])
    assert eos_of(checkpoint) == {7, 9, 300}


def test_its_id_may_be_in_its_configuration(checkpoint: Path) -> None:
    listed = {"300": {"content": END}, "301": {"content": "<other>"}}
    write(checkpoint, "tokenizer_config.json", eos_token=END, added_tokens_decoder=listed)
    (checkpoint / "tokenizer.json").unlink()
    assert eos_of(checkpoint) == {CONFIGURED, 300}


@pytest.mark.parametrize("token", [None, "<unknown>", 3, ["</s>"]])
def test_a_tokenizer_that_names_no_end_adds_none(checkpoint: Path, token: object) -> None:
    write(checkpoint, "tokenizer_config.json", eos_token=token)
    assert eos_of(checkpoint) == {CONFIGURED}


def test_an_end_that_the_model_cannot_draw_is_left_out(checkpoint: Path) -> None:
    add_end(checkpoint, VOCAB)
    write(checkpoint, "tokenizer_config.json", eos_token=END)
    assert eos_of(checkpoint) == {CONFIGURED}


def test_the_tokenizer_may_be_another_models(checkpoint: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write(other, "tokenizer_config.json", eos_token=END)
    write(other, "tokenizer.json", added_tokens=[{"id": 301, "content": END}])
    write(checkpoint, "tokenizer_config.json")
    assert eos_of(checkpoint, tokenizer=str(other)) == {CONFIGURED, 301}
    assert eos_of(checkpoint, tokenizer=str(tmp_path / "none")) == {CONFIGURED}


def test_a_broken_tokenizer_is_named(checkpoint: Path) -> None:
    write(checkpoint, "tokenizer_config.json", eos_token=END)
    (checkpoint / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        eos_of(checkpoint)


def test_a_text_ends_there(checkpoint: Path) -> None:
    prompt = list(range(3, 20))
    free = EngineDriver(checkpoint).tokens([Job(prompt, greedy(12))])[0]
    end = next(each for each in free[3:] if each not in (*free[:3], CONFIGURED))
    add_end(checkpoint, end)
    write(checkpoint, "tokenizer_config.json", eos_token=END)
    sampling = SamplingParams(seed=0, max_tokens=12, temperature=0.0)
    outcome = EngineDriver(checkpoint).run([Job(prompt, sampling)])[0]
    assert outcome.reason == "stop"
    assert outcome.token_ids == free[: free.index(end) + 1]
    model = ModelSettings(model=str(checkpoint))
    sim = load_sim(model, WorkerSettings(engine="sim"))
    assert sim.eos_token_ids == {CONFIGURED, end}

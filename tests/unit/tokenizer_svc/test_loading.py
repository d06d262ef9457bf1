"""Every kind of tokenizer encodes as in transformers; a broken one says what is wrong."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import AutoTokenizer

from tests.fakes.tokenizers import byte_level_bpe, sentencepiece, tekken, wordpiece, write_json
from tokenmesh.services.tokenizer_svc.loading import load_model
from tokenmesh.services.tokenizer_svc.text_encoder import TextEncoder
from tokenmesh.shared.config.loader import DEMO_MODEL
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.errors import CheckpointError, ConfigError

KINDS: dict[str, Callable[[Path], Path]] = {
    "byte-level bpe": byte_level_bpe,
    "sentencepiece bpe": lambda directory: sentencepiece(directory, "bpe"),
    "sentencepiece unigram": lambda directory: sentencepiece(directory, "unigram"),
    "tekken": tekken,
    "wordpiece": wordpiece,
}
TEXTS = [
    "",
    " ",
    "The quick fox",
    "  two  spaces\n\ttab ",
    "na\u00efve \u4f60\u597d \U0001f642",
    "</s><|im_end|>",
]


@pytest.mark.parametrize("kind", KINDS)
def test_texts_get_the_ids_that_transformers_gives(kind: str, tmp_path: Path) -> None:
    directory = KINDS[kind](tmp_path)
    ours = load_model(ModelSettings(model=str(directory)))
    theirs = AutoTokenizer.from_pretrained(directory)
    encoder = TextEncoder(ours.tokenizer)
    for text in TEXTS:
        for special in (True, False):
            ids = encoder.work(text, add_special_tokens=special)[0]()
            assert ids == theirs.encode(text, add_special_tokens=special)
            assert ours.tokenizer.decode(ids, skip_special_tokens=False) == theirs.decode(ids)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("max_tokens", [1, 3, 5, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_truncation_spares_special_tokens_as_in_transformers(
    kind: str, max_tokens: int, side: str, tmp_path: Path
) -> None:
    directory = KINDS[kind](tmp_path)
    ours = load_model(ModelSettings(model=str(directory)))
    theirs = AutoTokenizer.from_pretrained(directory, truncation_side=side)
    text = "The quick brown foxes jump over"
    for special in (True, False):
        room = max_tokens - theirs.num_special_tokens_to_add() if special else max_tokens
        if room < 1:
            continue
        work, _ = TextEncoder(ours.tokenizer).work(
            text,
            add_special_tokens=special,
            max_tokens=max_tokens,
            side="left" if side == "left" else "right",
        )
        assert work() == theirs.encode(
            text, add_special_tokens=special, truncation=True, max_length=max_tokens
        )


def test_facts_come_from_the_checkpoint(tmp_path: Path) -> None:
    directory = byte_level_bpe(tmp_path)
    write_json(
        directory / "generation_config.json",
        {"temperature": 0.6, "top_k": 20, "max_new_tokens": 9, "do_sample": True, "top_p": None},
    )
    loaded = load_model(ModelSettings(model=str(directory)))
    assert loaded.vocab_size == 512
    assert loaded.max_model_len == 64
    assert loaded.special_ids == [0, 1, 2]
    assert loaded.special_tokens["eos_token"] == "<|im_end|>"
    assert loaded.default_sampling == {"temperature": 0.6, "top_k": 20, "max_tokens": 9}
    assert list(loaded.templates) == ["default"]
    neutral = load_model(ModelSettings(model=str(directory), generation_config="vllm"))
    assert neutral.default_sampling == {}


def test_defaults_are_those_of_config_json_without_a_file_for_them(tmp_path: Path) -> None:
    directory = byte_level_bpe(tmp_path)
    text = {"repetition_penalty": 1.2, "temperature": 0.1}
    write_json(directory / "config.json", {"temperature": 0.6, "text_config": text})
    settings = ModelSettings(model=str(directory))
    assert load_model(settings).default_sampling == {"temperature": 0.6, "repetition_penalty": 1.2}
    write_json(directory / "generation_config.json", {"top_k": 20})
    assert load_model(settings).default_sampling == {"top_k": 20}


@pytest.mark.parametrize(
    ("has_own", "name"),
    [
        (False, "sentence_bert_config.json"),
        (True, "sentence_bert_config.json"),
        (False, "sentence_xlm-roberta_config.json"),
    ],
)
def test_texts_are_lowered_where_sentence_transformers_does_so(
    tmp_path: Path, has_own: bool, name: str
) -> None:
    directory = byte_level_bpe(tmp_path)
    if has_own:
        path = directory / "tokenizer.json"
        stored = {**json.loads(path.read_text()), "normalizer": {"type": "NFC"}}
        write_json(path, stored)
    cased = load_model(ModelSettings(model=str(directory))).tokenizer
    write_json(directory / name, {"do_lower_case": True})
    lowered = load_model(ModelSettings(model=str(directory))).tokenizer
    assert cased.encode("Hello World").ids != cased.encode("hello world").ids
    assert lowered.encode("Hello World").ids == cased.encode("hello world").ids


def test_the_demo_model_samples_greedily_by_default() -> None:
    loaded = load_model(ModelSettings(model=str(DEMO_MODEL)))
    assert loaded.default_sampling["temperature"] == 0.0


def test_a_vocabulary_larger_than_the_config_says_counts(tmp_path: Path) -> None:
    directory = byte_level_bpe(tmp_path)
    write_json(directory / "config.json", {"vocab_size": 7, "text_config": {"vocab_size": 8}})
    loaded = load_model(ModelSettings(model=str(directory)))
    assert loaded.vocab_size == loaded.tokenizer.get_vocab_size()


def test_a_length_and_a_tokenizer_of_the_operators_own_win(tmp_path: Path) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    model.mkdir()
    other.mkdir()
    write_json(model / "config.json", {"vocab_size": 5})
    byte_level_bpe(other)
    settings = ModelSettings(model=str(model), tokenizer=str(other), max_model_len=7)
    assert load_model(settings).max_model_len == 7


def test_truncation_and_padding_of_the_file_do_not_apply(tmp_path: Path) -> None:
    directory = byte_level_bpe(tmp_path)
    path = directory / "tokenizer.json"
    source = json.loads(path.read_text())
    source["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    source["padding"] = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    write_json(path, source)
    loaded = load_model(ModelSettings(model=str(directory)))
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("abcdefgh").ids) == "abcdefgh"
    assert json.loads(loaded.lean_json)["truncation"] is None
    assert json.loads(loaded.lean_json)["padding"] is None


def test_named_templates_are_kept_by_name(tmp_path: Path) -> None:
    directory = byte_level_bpe(tmp_path)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": [
            {"name": "default", "template": "plain"},
            {"name": "tool_use", "template": "tools"},
        ],
    }
    write_json(directory / "tokenizer_config.json", config)
    loaded = load_model(ModelSettings(model=str(directory)))
    assert loaded.templates == {"default": "plain", "tool_use": "tools"}


def test_the_operators_template_replaces_the_models_own(tmp_path: Path) -> None:
    directory = byte_level_bpe(tmp_path)
    file = tmp_path / "mine.jinja"
    file.write_text("mine")
    for setting, text in ((str(file), "mine"), ("{{ inline }}", "{{ inline }}")):
        loaded = load_model(ModelSettings(model=str(directory), chat_template=setting))
        assert loaded.templates == {"default": text}
    with pytest.raises(ConfigError, match="neither a readable file nor a template"):
        load_model(ModelSettings(model=str(directory), chat_template="nothing.jinja"))


def test_a_directory_without_tokenizer_names_the_files_that_would_do(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no tokenizer: none of tokenizer\.json"):
        load_model(ModelSettings(model=str(tmp_path)))


def test_a_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory, and it is not a hub id"):
        load_model(ModelSettings(model=str(tmp_path / "missing" / "model")))


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["{", "[]", '{"model": 1}', "\x00\xff"])
def test_a_corrupt_file_is_a_clear_error_or_harmless(
    name: str, content: str, tmp_path: Path
) -> None:
    directory = byte_level_bpe(tmp_path)
    (directory / name).write_bytes(content.encode("latin-1"))
    if name != "tokenizer.json" and content == '{"model": 1}':
        load_model(ModelSettings(model=str(directory)))
        return
    with pytest.raises(CheckpointError, match=str(directory)):
        load_model(ModelSettings(model=str(directory)))


def test_a_tokenizer_that_needs_code_of_its_own_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("a\nb\n")
    write_json(
        tmp_path / "tokenizer_config.json",
        {"tokenizer_class": "MyTokenizer", "auto_map": {"AutoTokenizer": ["mine.My", None]}},
    )
    (tmp_path / "mine.py").write_text("raise SystemExit('ran')")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_model(ModelSettings(model=str(tmp_path)))


def test_a_hub_id_is_fetched_without_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str | None, list[str]]] = []

    def snapshot(model: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((model, revision, allow_patterns))
        return str(byte_level_bpe(tmp_path))

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    loaded = load_model(ModelSettings(model="someone/model", revision="v1"))
    assert loaded.vocab_size == 512
    ((model, revision, patterns),) = asked
    assert (model, revision) == ("someone/model", "v1")
    assert not any("safetensors" in pattern for pattern in patterns)


def test_a_hub_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    with pytest.raises(CheckpointError, match=r"someone/model: .*the hub cannot be reached"):
        load_model(ModelSettings(model="someone/model"))


def test_an_operators_sampling_defaults_lie_over_the_checkpoints(tmp_path: Path) -> None:
    directory = byte_level_bpe(tmp_path)
    write_json(directory / "generation_config.json", {"temperature": 0.5, "top_k": 9})
    fields = {"model": str(directory), "override_generation_config": {"top_k": 3, "top_p": 0.8}}
    expected = {"temperature": 0.5, "top_k": 3, "top_p": 0.8}
    assert load_model(ModelSettings.model_validate(fields)).default_sampling == expected
    without = load_model(ModelSettings.model_validate({**fields, "generation_config": "vllm"}))
    assert without.default_sampling == {"top_k": 3, "top_p": 0.8}
    fields["override_generation_config"] = {"num_beams": 2}
    with pytest.raises(ConfigError, match="num_beams is none of temperature"):
        load_model(ModelSettings.model_validate(fields))

"""Settings come from flags, environment, file and defaults, and say what is wrong with them."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr, ValidationError

from tokenmesh.shared.config import Settings, load_settings
from tokenmesh.shared.config.loader import DEMO_MODEL, plain_values
from tokenmesh.shared.config.lora import LoraSettings
from tokenmesh.shared.errors import ConfigError


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of the developer's shell reaches a test."""
    for name in list(os.environ):
        if name.startswith("TOKENMESH_"):
            monkeypatch.delenv(name)


def write(folder: Path, text: str, name: str = "mesh.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def complaint(config_file: Path | None = None, overrides: dict[str, Any] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(config_file, overrides)
    return caught.value.message


def test_flags_win_over_environment_over_file_over_defaults(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = write(
        tmp_path, "[worker]\nmax_num_seqs = 1\nblock_size = 1\nmax_num_batched_tokens = 1\n"
    )
    monkeypatch.setenv("TOKENMESH_WORKER__MAX_NUM_SEQS", "2")
    monkeypatch.setenv("TOKENMESH_WORKER__BLOCK_SIZE", "2")
    worker = load_settings(path, {"worker": {"max_num_seqs": "3"}}).worker
    chosen = (worker.max_num_seqs, worker.block_size, worker.max_num_batched_tokens)
    assert chosen == (3, 2, 1)
    assert worker.max_waiting == Settings().worker.max_waiting


def test_settings_are_frozen() -> None:
    settings = load_settings()
    with pytest.raises(ValidationError):
        settings.gateway = Settings().gateway
    with pytest.raises(ValidationError):
        settings.gateway.port = 1


def test_settings_themselves_read_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMESH_GATEWAY__PORT", "1")
    assert Settings().gateway.port == 8000
    assert load_settings().gateway.port == 1


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("TOKENMESH_GATEWAY__PROT", "TOKENMESH_GATEWAY__PORT"),
        ("TOKENMESH_GATEWY__PORT", "TOKENMESH_GATEWAY"),
        ("TOKENMESH_MAX_NUM_SEQS", "TOKENMESH_WORKER__MAX_NUM_SEQS"),
        ("TOKENMESH_TOKENIZER__MEDIA__MAX_IMAGE", "TOKENMESH_TOKENIZER__MEDIA__MAX_IMAGES"),
        ("TOKENMESH_MODEL__MAX_MODEL_LENGTH", "TOKENMESH_MODEL__MAX_MODEL_LEN"),
    ],
)
def test_an_unknown_variable_is_an_error_that_suggests_the_nearest(
    monkeypatch: pytest.MonkeyPatch, name: str, nearest: str
) -> None:
    monkeypatch.setenv(name, "1")
    message = complaint()
    assert message.startswith(f"unknown setting {name};")
    assert message.endswith(f"did you mean {nearest}?")


def test_an_unknown_key_of_a_file_is_an_error_that_names_key_and_file(tmp_path: Path) -> None:
    path = write(tmp_path, "[worker]\nmax_seqs = 3\n")
    expected = "unknown setting worker.max_seqs in {0}; did you mean worker.max_num_seqs in {0}?"
    assert complaint(path) == expected.format(path)


def test_a_key_in_the_wrong_section_is_found(tmp_path: Path) -> None:
    path = write(tmp_path, "[worker]\nport = 3\n")
    assert "did you mean gateway.port" in complaint(path)


def test_a_wrong_value_says_field_value_and_what_would_be_right(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = write(tmp_path, "[worker]\nengine = 'gpu'\n")
    monkeypatch.setenv("TOKENMESH_GATEWAY__PORT", "many")
    message = complaint(path, {"model": {"max_model_len": -3}})
    assert "--max-model-len = -3: should be greater than or equal to 1" in message
    assert "TOKENMESH_GATEWAY__PORT = 'many': should be a valid integer" in message
    assert f"worker.engine in {path} = 'gpu': should be 'torch' or 'sim'" in message


def test_a_value_of_several_kinds_says_all_that_would_be_right(tmp_path: Path) -> None:
    assert (
        load_settings(overrides={"model": {"max_model_len": "auto"}}).models[0].stated_len is None
    )
    path = write(tmp_path, "[model]\nmodel = 'm'\nmax_model_len = 'most'\n")
    assert complaint(path) == (
        f"model.max_model_len in {path} = 'most': should be a valid integer, "
        "unable to parse string as an integer or 'auto'"
    )


def test_a_wrong_secret_is_not_shown(tmp_path: Path) -> None:
    path = write(tmp_path, "[bus]\npassword = ['hush']\n")
    message = complaint(path)
    assert "bus.password" in message
    assert "hush" not in message


@pytest.mark.parametrize(
    "text",
    [
        "[gateway]\napi_key_hashes = ['sk-hush']\n",
        "[telemetry.otlp_headers]\nauthorization = ['hush']\n",
        "[responses.mcp_servers.a]\nurl = 'http://a'\nheaders = { x = ['hush'] }\n",
    ],
)
def test_what_may_hold_a_secret_is_not_shown(tmp_path: Path, text: str) -> None:
    assert "hush" not in complaint(write(tmp_path, text))


def test_a_file_that_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    assert "absent.toml: No such file" in complaint(tmp_path / "absent.toml")
    assert "does not parse" in complaint(write(tmp_path, "[worker\n"))
    assert "must hold a table" in complaint(write(tmp_path, "[1]", "list.json"))


def test_a_section_that_is_no_table_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert "worker" in complaint(write(tmp_path, "worker = 3\n"))
    assert "model" in complaint(write(tmp_path, "model = 3\n", "model.toml"))
    monkeypatch.setenv("TOKENMESH_BUS", "{not json")
    assert "TOKENMESH_" in complaint()


def test_lists_in_the_environment_are_json_or_separated_by_commas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TOKENMESH_MODEL__MODEL", "m")
    for text in ("a, b", '["a", "b"]'):
        monkeypatch.setenv("TOKENMESH_MODEL__SERVED_MODEL_NAME", text)
        assert load_settings().models[0].served_model_name == ("a", "b")


def test_without_a_model_the_demo_model_is_served_under_its_own_name() -> None:
    (model,) = load_settings(overrides={"model": {"max_model_len": 64}}).models
    assert (model.model, model.name, model.max_model_len) == (str(DEMO_MODEL), "tokenmesh-demo", 64)
    (named,) = load_settings(overrides={"model": {"model": "x"}}).models
    assert named.name == "x"


def test_the_one_model_is_laid_over_source_by_source(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = write(tmp_path, "[[models]]\nmodel = 'm'\nmax_model_len = 8\ndtype = 'float32'\n")
    monkeypatch.setenv("TOKENMESH_MODEL__MAX_MODEL_LEN", "9")
    (model,) = load_settings(path, {"model": {"served_model_name": ["n"]}}).models
    assert (model.model, model.max_model_len, model.dtype, model.name) == ("m", 9, "float32", "n")


def test_a_shorthand_for_several_models_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "[[models]]\nmodel = 'a'\n[[models]]\nmodel = 'b'\n")
    assert len(load_settings(path).models) == 2
    message = complaint(path, {"model": {"max_model_len": 3}})
    assert message == "--max-model-len is ambiguous: several models are configured"


def test_a_dump_for_a_child_loads_to_the_same_settings_with_its_secrets(tmp_path: Path) -> None:
    settings = load_settings(
        overrides={
            "bus": {"password": "hush"},
            "telemetry": {"otlp_headers": {"authorization": "secret"}},
            "model": {"model": "m", "served_model_name": ["a", "b"]},
        }
    )
    path = write(tmp_path, json.dumps(plain_values(settings)), "child.json")
    loaded = load_settings(path)
    assert loaded == settings
    assert loaded.bus.password == SecretStr("hush")
    assert "hush" not in repr(loaded)


def test_adapters_are_named_as_on_the_command_line_of_vllm() -> None:
    pairs = ["a=/x/a", '{"name": "b", "path": "/x/b", "base_model_name": "m"}']
    settings = LoraSettings.model_validate({"lora_modules": pairs})
    assert settings.lora_modules == {"a": "/x/a", "b": "/x/b"}
    for wrong in (["a"], ["=/x"], ["a="], ["a=1", "a=2"], ['{"name": "a"}'], ["{"]):
        with pytest.raises(ValidationError):
            LoraSettings.model_validate({"lora_modules": wrong})

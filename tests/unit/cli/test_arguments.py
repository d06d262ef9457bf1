"""A `vllm serve` line works after `tokenmesh up`, and what does not says so."""

import hashlib
import shlex
from math import inf
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from tokenmesh import __version__
from tokenmesh.cli import vllm_flags
from tokenmesh.cli.arguments import arrange
from tokenmesh.cli.flags import FLAGS, UP_FLAGS, human_number, name_models, with_flags
from tokenmesh.cli.main import known_flags, run
from tokenmesh.shared.config import load_settings
from tokenmesh.shared.errors import ConfigError


def overrides_of(line: str | list[str]) -> dict[str, Any]:
    """Return the overrides that `up` makes of a command line."""
    seen: dict[str, Any] = {}

    def command(
        model_tags: Annotated[list[str] | None, typer.Argument()] = None,
        *,
        overrides: dict[str, Any],
    ) -> None:
        """A stand-in for `up`."""
        name_models(overrides, model_tags or ())
        seen.update(overrides)

    app = typer.Typer()
    app.command()(with_flags(command, UP_FLAGS))
    words = line.split() if isinstance(line, str) else line
    app(arrange(words, known_flags("up")), standalone_mode=False)
    return seen


def test_a_vllm_line_needs_only_its_first_two_words_changed() -> None:
    line = (
        "some/model --host 127.0.0.1 --port 8100 --served-model-name a b --dtype bfloat16 "
        "--max-model-len 8k --max-num-seqs 64 --max-num-batched-tokens 2K --block-size 16 "
        "--api-key k1 k2 --chat-template t.jinja --enable-prefix-caching --tokenizer tok "
        "--revision main --generation-config vllm --uvicorn-log-level warning "
        "--seed 7 --num-gpu-blocks-override 99 --gpu-memory-utilization 0.5"
    )
    settings = load_settings(overrides=overrides_of(line))
    (model,) = settings.models
    assert (model.model, model.served_model_name) == ("some/model", ("a", "b"))
    assert (model.dtype, model.max_model_len, model.revision) == ("bfloat16", 8000, "main")
    assert (model.tokenizer, model.chat_template) == ("tok", "t.jinja")
    assert model.generation_config == "vllm"
    worker = settings.worker
    assert (worker.max_num_seqs, worker.max_num_batched_tokens, worker.block_size) == (64, 2048, 16)
    assert (worker.num_gpu_blocks_override, worker.gpu_memory_utilization) == (99, 0.5)
    assert worker.enable_prefix_caching
    assert settings.gateway.seed == 7
    assert (settings.gateway.host, settings.gateway.port) == ("127.0.0.1", 8100)
    assert settings.telemetry.log_level == "warning"


def test_vllms_other_names_of_types() -> None:
    for name, dtype in (("half", "float16"), ("float", "float32")):
        settings = load_settings(overrides=overrides_of(f"some/model --dtype {name}"))
        assert settings.models[0].dtype == dtype


@pytest.mark.parametrize(
    "name", ["--num-gpu-blocks-override", "--num-kv-blocks", "--num_kv_blocks"]
)
def test_kv_blocks_have_two_names(name: str) -> None:
    worker = load_settings(overrides=overrides_of(f"m {name}=77")).worker
    assert worker.num_gpu_blocks_override == 77


def test_memory_and_admin_flags_reach_their_settings() -> None:
    line = "m --kv-cache-memory-bytes 2G --profiler-dir out --enable-admin-routes"
    settings = load_settings(overrides=overrides_of(line))
    assert settings.worker.kv_cache_memory_bytes == 2 << 30
    assert settings.worker.profiler_dir == "out"
    assert settings.gateway.admin_routes
    assert not load_settings(
        overrides=overrides_of("m --no-enable-admin-routes")
    ).gateway.admin_routes


def test_api_keys_are_kept_as_hashes_only() -> None:
    overrides = overrides_of("--api-key one two")
    expected = [hashlib.sha256(key.encode()).hexdigest() for key in ("one", "two")]
    assert overrides == {"gateway": {"api_key_hashes": expected}}


@pytest.mark.parametrize("line", [["--api-key", ""], ["--api-key="], ["--api-key", "one", " "]])
def test_an_empty_api_key_is_refused(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["up", *line]) == 2
    assert "--api-key is empty" in capsys.readouterr().err


@pytest.mark.parametrize("line", [["--served-model-name", ""], [""]])
def test_an_empty_name_of_a_model_is_refused(
    line: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["up", *line]) == 2
    assert "at least 1 character" in capsys.readouterr().err


def test_flags_may_be_spelled_with_underscores_and_equals_signs() -> None:
    assert overrides_of("--max_num_seqs=3 --no_enable_prefix_caching") == {
        "worker": {"max_num_seqs": "3", "enable_prefix_caching": False}
    }


def test_a_flag_that_is_not_given_sets_nothing() -> None:
    assert overrides_of("") == {}


def test_the_model_may_be_named_by_flag_or_by_position_but_not_twice() -> None:
    assert overrides_of("--model m") == overrides_of("m") == {"model": {"model": "m"}}
    with pytest.raises(ConfigError, match="two models"):
        overrides_of("m --model other")


def test_words_after_two_hyphens_and_negative_numbers_are_no_flags() -> None:
    assert arrange(["--port", "-1", "--", "--x"], {"--port"}) == ["--port", "-1", "--", "--x"]


def test_a_short_flag_is_that_of_its_setting() -> None:
    assert arrange(["-q", "int8"], {"--quantization"}) == ["--quantization", "int8"]


@pytest.mark.parametrize(
    "words",
    [
        ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}'],
        ['-sc={"method": "ngram", "num_speculative_tokens": 4}'],
        ["--speculative_config.method=ngram", "--speculative-config.num_speculative_tokens", "4"],
        ["-sc.method", "ngram", "--speculative-config", '{"num_speculative_tokens": 4}'],
        ["--spec-method", "ngram", "--spec-tokens", "4"],
        ["--spec-model", "ngram", "--speculative-config", '{"num_speculative_tokens": 4}'],
    ],
)
def test_drafts_are_configured_as_one_object_or_by_its_keys(words: list[str]) -> None:
    (model,) = load_settings(overrides=overrides_of(["m", *words])).models
    assert (model.speculative_config.method, model.speculative_config.max_drafts) == ("ngram", 4)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["--spec-method", "medusa"],
            "method medusa is not implemented",
        ),
        (["-sc", "{nonsense", "--spec-tokens", "3"], "speculative_config is a JSON object"),
        (["-sc", "{nonsense"], "should be a valid dictionary"),
        (["--spec-method", "ngram", "--spec-tokens", "0"], "greater than or equal to 1"),
    ],
)
def test_drafts_that_are_not_there_are_refused_before_anything_starts(
    words: list[str], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        load_settings(overrides=overrides_of(["m", *words]))


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("--node-rank", "torchrun starts ranks on several hosts"),
        ("-n", "torchrun starts ranks on several hosts"),
        ("--speculative-model", "--spec-model names the model that drafts"),
        ("--kv-transfer-config.role", "unknown flag --kv-transfer-config.role"),
        ("-O3", "-O3 is a flag of vLLM that TokenMesh does not have: kernels are compiled"),
        ("-cc.mode=3", "-cc.mode is a flag of vLLM that TokenMesh does not have: kernels"),
        ("--lora-dtype=float16", "can only be auto: adapters are computed in the model's type"),
        ("--enable-tower-connector-lora", "does not have: adapters of towers are not served"),
        ("--lora-target-modules", "does not have: every linear layer that an adapter has"),
        ("--lora-extra-vocab-size=9", "TokenMesh does not have: adapters with a vocabulary"),
        ("--no-enable-chunked-prefill", "prefill is always chunked"),
        ("--nnodes=2", "can only be 1: torchrun starts ranks on several hosts"),
        ("--task=embed", "can only be auto or generate: `--runner` and `--convert`"),
        ("--max-num", "may be any of --max-num-active-seqs, --max-num-batched-tokens"),
        ("--structured-outputs-config.disable-any-whitespace", "of its keys there is `backend`"),
        ("--max-modle-len", "unknown flag --max-modle-len; --help lists the flags"),
        ("--tokenizer-mode", "can only be auto or hf"),
        ("--zzz", "unknown flag --zzz"),
    ],
)
def test_a_flag_we_do_not_have_says_so(flag: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        overrides_of(f"{flag} 3")
    assert expected in caught.value.message


@pytest.mark.parametrize("flag", sorted(vllm_flags.NAMES))
def test_no_flag_of_vllm_is_taken_for_another_one(flag: str) -> None:
    taken, complaint = ["refused"], ""
    try:
        taken = arrange([f"--{flag}", "no such value"], known_flags("serve"))
    except ConfigError as error:
        complaint = error.message
    assert taken in (["refused"], [], ["no such value"])
    assert "did you mean" not in complaint


def test_flags_of_vllm_for_what_is_so_anyway_are_taken() -> None:
    line = (
        "m --enable-auto-tool-choice --enable-chunked-prefill --enable-prompt-tokens-details "
        "--enable-server-load-tracking --task generate --show-hidden-metrics-for-version 0.1 "
        "--enable-request-id-headers -n 1 --no-enable-dbo "
        "--disable_log_requests --tokenizer-mode auto"
    )
    assert overrides_of(line) == {"model": {"model": "m"}}


VLLM_LINES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "vllm serve some/model -q gptq --kv-cache-dtype fp8 --max-model-len 4k": (
        {"quantization": "gptq"},
        {"kv_cache_dtype": "fp8"},
        {},
    ),
    "vllm serve some/model --quantization=fp8 --kv_cache_dtype fp8_e5m2 --dtype half": (
        {"quantization": "fp8", "dtype": "float16"},
        {"kv_cache_dtype": "fp8_e5m2"},
        {},
    ),
    "vllm serve some/model --quantization awq_marlin --kv-cache-dtype auto -tp 1": (
        {"quantization": "awq_marlin"},
        {"kv_cache_dtype": "auto"},
        {},
    ),
    "vllm serve --model some/model --enable-lora --lora-modules sql=/adapters/sql fr=/adapters/fr "
    "--max-loras 4 --max-cpu-loras 16 --max-lora-rank 64 --quantization bitsandbytes": (
        {"quantization": "bitsandbytes"},
        {},
        {
            "enable_lora": True,
            "lora_modules": {"sql": "/adapters/sql", "fr": "/adapters/fr"},
            "max_loras": 4,
            "max_cpu_loras": 16,
            "max_lora_rank": 64,
        },
    ),
    "vllm serve some/model --enable-lora --lora-dtype auto --fully-sharded-loras "
    """--lora-modules a=/a '{"name": "b", "path": "/b", "base_model_name": "some/model"}'""": (
        {},
        {},
        {"enable_lora": True, "lora_modules": {"a": "/a", "b": "/b"}},
    ),
    "vllm serve some/model --no-enable-lora": ({}, {}, {"enable_lora": False}),
    "vllm serve some/model --enable-lora --kv-cache-dtype fp8_e4m3 "
    """--lora-modules '{"name": "sql", "path": "/adapters/sql"}'""": (
        {},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"enable_lora": True, "lora_modules": {"sql": "/adapters/sql"}},
    ),
}


@pytest.mark.parametrize("line", VLLM_LINES)
def test_a_line_of_vllm_works_with_its_first_two_words_changed(line: str) -> None:
    words = shlex.split(line)
    assert words[:2] == ["vllm", "serve"]
    settings = load_settings(overrides=overrides_of(words[2:]))
    model, worker, lora = VLLM_LINES[line]
    (found,) = settings.models
    assert found.model == "some/model"
    assert {key: getattr(found, key) for key in model} == model
    assert {key: getattr(settings.worker, key) for key in worker} == worker
    assert {key: getattr(settings.worker.lora, key) for key in lora} == lora


def test_types_of_a_kv_cache_that_are_not_served_are_refused_by_name() -> None:
    for name in ("fp8_inc", "fp8_ds_mla", "float16"):
        with pytest.raises(ConfigError, match="'auto', 'bfloat16', 'fp8'"):
            load_settings(overrides=overrides_of(f"m --kv-cache-dtype {name}"))


def test_code_of_a_checkpoint_is_a_setting() -> None:
    overrides = overrides_of("m --trust-remote-code")
    assert overrides == {"model": {"model": "m", "trust_remote_code": True}}


@pytest.mark.parametrize(
    "line",
    [
        "--structured-outputs-config.backend guidance",
        '--structured-outputs-config {"backend":"guidance"}',
        '--structured_outputs_config={"backend":"guidance"}',
    ],
)
def test_the_library_of_grammars_is_named_as_in_vllm(line: str) -> None:
    worker = load_settings(overrides=overrides_of(line)).worker
    assert worker.structured_outputs_backend == "guidance"


def test_a_json_flag_that_is_no_object_is_explained() -> None:
    for text in ("{", "[]"):
        with pytest.raises(ConfigError, match="takes a JSON object"):
            overrides_of(f"--structured-outputs-config {text}")


def test_a_flag_may_be_shortened_as_long_as_it_is_the_only_one() -> None:
    assert overrides_of("--max-model 4k --served a b --no-async") == {
        "model": {"max_model_len": "4000", "served_model_name": ["a", "b"]},
        "worker": {"async_scheduling": False},
    }


def test_gateways_have_vllms_name_too() -> None:
    for flag in ("--gateways", "--api-server-count", "-asc"):
        assert load_settings(overrides=overrides_of(f"{flag} 3")).up.gateways == 3


def test_what_answers_contain_unasked_is_set_by_flags() -> None:
    gateway = load_settings(
        overrides=overrides_of("--enable-force-include-usage --return-tokens-as-token-ids")
    ).gateway
    assert gateway.force_include_usage
    assert gateway.return_tokens_as_token_ids


def test_the_key_in_vllms_variable_guards_where_nothing_else_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    hashed = hashlib.sha256(b"secret").hexdigest()
    assert load_settings().gateway.api_key_hashes == (hashed,)
    assert "VLLM_API_KEY is used" in caplog.text
    assert "secret" not in caplog.text
    other = load_settings(overrides=overrides_of("--api-key other")).gateway.api_key_hashes
    assert other == (hashlib.sha256(b"other").hexdigest(),)
    file = tmp_path / "mesh.toml"
    file.write_text("[gateway]\napi_key_hashes = []\n")
    assert load_settings(file).gateway.api_key_hashes == ()
    monkeypatch.setenv("VLLM_API_KEY", "")
    assert load_settings().gateway.api_key_hashes == ()


def test_no_flag_is_both_ours_and_missing() -> None:
    ours = {flag.name.removeprefix("--") for flag in UP_FLAGS}
    assert ours & vllm_flags.NAMES == set()


@pytest.mark.parametrize(
    ("text", "number"),
    [("8k", "8000"), ("8K", "8192"), ("1.5k", "1500"), ("2M", "2097152"), ("x", "x"), ("k", "k")],
)
def test_numbers_may_end_in_a_scale(text: str, number: str) -> None:
    assert human_number(text) == number


@pytest.mark.parametrize("command", ["up", "serve"])
def test_help_shows_every_flag_whole(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert [flag.name for flag in FLAGS if flag.name not in text] == []


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("up --port 99999", "--port = '99999': should be less than or equal to 65535"),
        ("up --max-model-len=-1", "--max-model-len = '-1': should be greater than or equal to 1"),
        ("serve some/model", "to serve a model use `tokenmesh up some/model`"),
        ("serve gateway --config absent.toml", "cannot read absent.toml"),
        ("trace x --url nonsense", "nonsense: Request URL is missing"),
    ],
)
def test_a_wrong_command_line_is_a_sentence_and_exit_code_2(
    line: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(line.split()) == 2
    assert complaint in capsys.readouterr().err


def test_an_unknown_command_is_misuse(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sreve"]) == 2
    assert "sreve" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ("show", "/v1/models"),
        ("stop", "Ctrl-C"),
    ],
)
def test_a_command_of_another_server_leads_to_ours(
    command: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([command, "some/model"]) == 2
    shown = capsys.readouterr().err
    assert f"unknown command {command}" in shown
    assert hint in shown


def test_a_broken_config_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text("[gateway]\nprot = 1\n")
    assert run(["up", "--config", str(path)]) == 2
    assert "did you mean gateway.port" in capsys.readouterr().err


def test_the_version_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"tokenmesh {__version__}\n"


def test_several_models_get_the_flags_of_models() -> None:
    line = "some/a some/b --on-demand --keep-alive -1 --dtype bfloat16 --max-awake-models 2"
    settings = load_settings(overrides=overrides_of(line))
    assert [model.model for model in settings.models] == ["some/a", "some/b"]
    assert [model.keep_alive_s for model in settings.models] == [inf, inf]
    assert all(model.on_demand and model.dtype == "bfloat16" for model in settings.models)
    assert settings.up.max_awake_models == 2


@pytest.mark.parametrize("flag", ["--model c", "--served-model-name x", "--tokenizer t"])
def test_flags_of_one_model_do_not_go_with_several(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag.split()[0]} is for one model"):
        overrides_of(f"some/a some/b {flag}")

"""Lines with which vLLM's own tests start a server are taken unchanged, or refused with advice."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.cli.test_arguments import overrides_of
from tokenmesh.cli import vllm_flags
from tokenmesh.cli.arguments import arrange
from tokenmesh.cli.main import known_flags, run
from tokenmesh.shared.config import Settings, load_settings
from tokenmesh.shared.errors import ConfigError

_REFUSED = "    refused: "


def _read() -> Iterator[tuple[str, str]]:
    """Each list of arguments, and the end of the error that it meets; empty: it is taken."""
    lines = Path(__file__).with_name("vllm_lines.txt").read_text().splitlines()
    lines = [line for line in lines if not line.startswith("#")]
    for line, below in zip(lines, [*lines[1:], ""], strict=True):
        if not line.startswith(_REFUSED):
            yield line, below.removeprefix(_REFUSED) if below.startswith(_REFUSED) else ""


LINES = list(_read())


def settings_of(*words: str) -> Settings:
    return load_settings(overrides=overrides_of(["some/model", *words]))


@pytest.mark.parametrize("line", [line for line, problem in LINES if not problem])
def test_a_line_of_vllms_tests_is_taken_unchanged(line: str) -> None:
    settings = settings_of(*shlex.split(line))
    assert settings.models[0].model == "some/model"


@pytest.mark.parametrize(("line", "problem"), [each for each in LINES if each[1]])
def test_a_line_that_is_refused_says_what_to_do(line: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings_of(*shlex.split(line))
    assert caught.value.message.endswith(problem)


@pytest.mark.parametrize("flag", sorted(vllm_flags.REFUSED))
def test_each_flag_of_vllm_that_is_refused_says_what_to_do(flag: str) -> None:
    with pytest.raises(ConfigError) as caught:
        arrange([f"--{flag}", '{"key": 1}'], known_flags("serve"))
    message = caught.value.message
    assert message.startswith(f"--{flag}")
    assert " is a flag of vLLM that TokenMesh does not have: " in message
    assert message.endswith(vllm_flags.REFUSED[flag])
    named = re.findall(r"--[a-z][a-z-]+", vllm_flags.REFUSED[flag])
    assert set(named) <= {each.partition(".")[0] for each in known_flags("up")}


@pytest.mark.parametrize("flag", ["--max-modle-len", "--wroker", "--tensor-paralel-size"])
def test_an_unknown_flag_is_never_taken_for_one_that_is_spelled_alike(flag: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings_of(flag, "3")
    text = caught.value.message.removeprefix(f"unknown flag {flag}")
    assert re.findall(r"--[a-z-]+", text) == ["--help"]


def test_expert_parallelism_is_a_setting_of_workers() -> None:
    assert settings_of("--enable-expert-parallel").worker.enable_expert_parallel


@pytest.mark.parametrize("flag", ["-dcp", "--decode-context-parallel-size", "-pcp"])
def test_sequences_are_not_divided(flag: str) -> None:
    assert settings_of(flag, "1").worker.tensor_parallel_size == 1
    with pytest.raises(ConfigError, match="--tensor-parallel-size divides KV"):
        settings_of(flag, "2")


def test_ranks_of_data_parallelism_are_replicas() -> None:
    assert settings_of("-dp", "3").up.workers == 3
    with pytest.raises(ConfigError, match="replicas are workers of their own"):
        arrange(["-dp", "3"], known_flags("serve"))


def test_keys_of_objects_reach_their_settings() -> None:
    pooler = {"pooling_type": "mean", "task": "embed", "use_activation": False}
    pooler |= {"enable_chunked_processing": True, "max_embed_len": 3_072_000}
    profiler = {"profiler": "torch", "torch_profiler_dir": "/p", "torch_profiler_use_gzip": True}
    events = {"enable_kv_cache_events": True, "publisher": None, "buffer_steps": 7}
    reasoning = {"reasoning_start_str": "<think>", "reasoning_end_str": "Enough.</think>"}
    settings = settings_of(
        *("--pooler-config", json.dumps(pooler), f"--profiler_config={json.dumps(profiler)}"),
        *("--kv-events-config", json.dumps(events), "--reasoning-config", json.dumps(reasoning)),
        *("--hf-overrides", '{"a": {"b": 1}}', "--override-generation-config.top_k", "5"),
        *("--limit-mm-per-prompt.image", "2", "--limit_mm_per_prompt.video=0"),
    )
    [model] = settings.models
    assert (model.pooling_type, model.pooling_task) == ("MEAN", "embed")
    assert model.pooling_activation is False
    assert (model.embed_in_chunks, model.max_embed_len) == (True, 3_072_000)
    assert model.reasoning_end_str == "Enough.</think>"
    assert (model.hf_overrides, model.override_generation_config) == ({"a": {"b": 1}}, {"top_k": 5})
    assert model.limit_mm_per_prompt == {"image": 2, "video": 0}
    assert settings.worker.profiler_dir == "/p"
    assert (settings.block_events.enabled, settings.block_events.replay_batches) == (True, 7)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--kv-events-config", '{"publisher": "zmq"}'), "can only be null: events are published"),
        (("--pooler-config", '{"normalize": true}'), "of its keys there are pooling_type, task"),
        (("--pooler-config.pooling_type", "STEP"), "should be 'CLS', 'LAST' or 'MEAN'"),
        (("--profiler-config", '{"profiler": "cuda"}'), "can only be torch"),
        (("--logprobs-mode", "raw_logits"), "should be 'raw_logprobs' or 'processed_logprobs'"),
        (("--hf-overrides", "[1]"), "should be a valid dictionary"),
        (("--hf-overrides.a",), "--hf-overrides.a needs a value"),
    ],
)
def test_keys_and_values_that_are_not_served_are_refused(
    words: tuple[str, ...], problem: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        settings_of(*words)
    assert problem in caught.value.message


def test_quantized_by_modelopt_has_all_of_vllms_names() -> None:
    for name in ("modelopt_fp8", "modelopt_mxfp8", "modelopt_mixed"):
        assert settings_of("--quantization", name).models[0].quantization == name


@pytest.mark.parametrize("name", ["VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"])
def test_variables_of_vllm_turn_the_admins_routes_on_where_nothing_else_decides(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(name, "1")
    assert load_settings().gateway.admin_routes
    assert f"{name} is taken as --enable-admin-routes" in caplog.text
    assert not settings_of("--no-enable-admin-routes").gateway.admin_routes
    monkeypatch.setenv(name, "0")
    assert not load_settings().gateway.admin_routes


def test_a_start_date_that_is_no_day_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_SYSTEM_START_DATE", "2025-06-28")
    load_settings()
    monkeypatch.setenv("VLLM_SYSTEM_START_DATE", "June")
    with pytest.raises(ConfigError, match=r"VLLM_SYSTEM_START_DATE = 'June': should be a day"):
        load_settings()


def test_launch_leads_to_its_one_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["launch"]) == 2
    assert "launch render MODEL" in capsys.readouterr().err
    assert run(["launch", "render", "/no/such/model", "--port", "0"]) == 2
    assert "/no/such/model: no such directory" in capsys.readouterr().err

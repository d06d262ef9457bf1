"""The loader: what it refuses, and that each error names what is wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fakes.engine_driver import EngineDriver, Job, greedy, load
from tests.fakes.quantized import shard
from tests.fakes.tiny import Tiny, prompt_of
from tokenmesh.engine.exec.build import build_runner
from tokenmesh.engine.exec.choose_dtype import choose_dtype
from tokenmesh.engine.models.native.read_config import read_facts
from tokenmesh.engine.models.raw_config import read_json
from tokenmesh.kernels.native import has_started
from tokenmesh.shared.config.model import Dtype, ModelSettings
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import CheckpointError, ConfigError

Tensors = dict[str, torch.Tensor]
Damage = Callable[[Tensors], None]


@pytest.fixture
def copy(tiny: Tiny, tmp_path: Path) -> Callable[[str], Path]:
    """A checkpoint that a test may damage."""

    def make(name: str) -> Path:
        for file in tiny(name).directory.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        return tmp_path

    return make


def edit_config(directory: Path, **values: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def edit_tensors(directory: Path, damage: Damage) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    damage(tensors)
    save_file(tensors, path)


def refusal(directory: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        load(directory)
    return error.value.message


def test_a_sharded_checkpoint_is_the_same_model(tiny: Tiny, copy: Callable[[str], Path]) -> None:
    directory = copy("llama")
    shard(directory, 3)
    prompt = prompt_of(20)
    expected = tiny("llama").greedy([prompt], 8)
    assert EngineDriver(directory).tokens([Job(prompt, greedy(8))]) == expected


def drop_gate(tensors: Tensors) -> None:
    del tensors["model.layers.1.mlp.gate_proj.weight"]


def add_two(tensors: Tensors) -> None:
    tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones(12)
    tensors["extra"] = torch.ones(1)


def cut_norm(tensors: Tensors) -> None:
    tensors["model.norm.weight"] = torch.ones(63)


def quantize_one(tensors: Tensors) -> None:
    name = "model.layers.2.mlp.down_proj.weight"
    tensors[name] = tensors[name].to(torch.int8)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (drop_gate, ["model.layers.1.mlp.gate_proj.weight", "missing", "[80, 64]"]),
        (add_two, ["unknown", "extra", "model.layers.0.self_attn.q_norm.weight"]),
        (cut_norm, ["model.norm.weight", "[63]", "[64]"]),
        (quantize_one, ["model.layers.2.mlp.down_proj.weight", "I8"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wrong_tensor_is_named(
    copy: Callable[[str], Path], damage: Damage, words: list[str]
) -> None:
    directory = copy("llama")
    edit_tensors(directory, damage)
    message = refusal(directory)
    assert [word for word in words if word not in message] == []


def test_derived_buffers_and_a_tied_head_are_not_unknown_tensors(
    copy: Callable[[str], Path],
) -> None:
    directory = copy("llama_odd")

    def add(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(7)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    edit_tensors(directory, add)
    load(directory)


def test_a_head_of_its_own_counts_even_when_the_config_says_tied(
    tiny: Tiny, copy: Callable[[str], Path]
) -> None:
    directory = copy("llama_odd")
    edit_tensors(
        directory,
        lambda tensors: tensors.update(
            {"lm_head.weight": tensors["model.embed_tokens.weight"].roll(1, 0).contiguous()}
        ),
    )
    prompt = prompt_of(20)
    (tied,) = tiny("llama_odd").greedy([prompt], 1)
    assert EngineDriver(directory).tokens([Job(prompt, greedy(1))]) == [[tied[0] + 1]]


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.99])
def test_a_truncated_file_is_named(copy: Callable[[str], Path], share: float) -> None:
    directory = copy("llama")
    path = directory / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    assert str(path) in refusal(directory)


def test_a_missing_shard_and_a_tensor_missing_from_its_shard_are_named(
    copy: Callable[[str], Path],
) -> None:
    directory = copy("llama")
    shard(directory, 2)
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["ghost"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    assert "ghost" in refusal(directory)
    (directory / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors" in refusal(directory)
    index.write_text("{")
    assert "index.json" in refusal(directory)


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    assert "config.json" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("{nonsense")
    assert "valid JSON" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert "object" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert "architectures" in refusal(tmp_path)


def test_a_directory_without_weights_is_refused(copy: Callable[[str], Path]) -> None:
    directory = copy("llama")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    assert "safetensors" in refusal(directory)


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        (
            "MambaForCausalLM",
            {"model_type": "mamba", "state_size": -1},
            "transformers cannot build it",
        ),
        ("NoSuchForCausalLM", {}, "transformers has no such class"),
    ],
)
def test_an_architecture_that_cannot_be_served_is_named_with_the_reason(
    copy: Callable[[str], Path], name: str, fields: dict[str, object], reason: str
) -> None:
    directory = copy("llama")
    edit_config(directory, architectures=[name], **fields)
    assert f"{name} cannot be served: {reason}" in refusal(directory)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", None),
        ("hidden_size", "48"),
        ("num_hidden_layers", 0),
        ("num_key_value_heads", 3),
        ("head_dim", 11),
        ("vocab_size", True),
        ("rms_norm_eps", "small"),
        ("tie_word_embeddings", 1),
        ("hidden_act", "none such"),
        ("rope_parameters", "default"),
        ("quantization_config", {"quant_method": "hqq"}),
    ],
)
def test_a_bad_key_of_config_json_is_named(
    copy: Callable[[str], Path], key: str, value: object
) -> None:
    directory = copy("llama")
    edit_config(directory, **{key: value})
    assert f"config.json: {key}" in refusal(directory)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "spiral"},
        {"rope_type": "linear"},
        {"rope_type": "linear", "factor": 0},
        {"rope_type": "llama3", "factor": 8.0},
        {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]},
    ],
    ids=str,
)
def test_bad_rope_parameters_are_named(
    copy: Callable[[str], Path], rope: dict[str, object]
) -> None:
    directory = copy("llama")
    edit_config(directory, rope_parameters=rope)
    assert "rope_parameters" in refusal(directory)


def test_the_old_spelling_of_rope_is_the_same_model(
    tiny: Tiny, copy: Callable[[str], Path]
) -> None:
    directory = copy("llama_rope3")
    rope = json.loads((directory / "config.json").read_text())["rope_parameters"]
    theta = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    edit_config(
        directory, rope_parameters=None, rope_theta=theta, rope_scaling={**rope, "type": kind}
    )
    prompt = prompt_of(50)
    expected = tiny("llama_rope3").greedy([prompt], 8)
    assert EngineDriver(directory).tokens([Job(prompt, greedy(8))]) == expected


def test_a_path_that_does_not_exist_is_not_looked_up_on_the_hub(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path / "a" / "b"):
        assert "no such directory" in refusal(path)


def test_a_hub_id_that_cannot_be_reached_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match=r"absent/nothing: .*hub"):
        build_runner(ModelSettings(model="absent/nothing"), WorkerSettings(), lambda a, b: None)


def test_end_of_sequence_ids_come_from_either_file(copy: Callable[[str], Path]) -> None:
    directory = copy("llama")
    generation = directory / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert load(directory)[0].eos_token_ids == {7, 9}
    generation.write_text(json.dumps({"temperature": 0.5}))
    assert load(directory)[0].eos_token_ids == {2}
    generation.write_text(json.dumps({"eos_token_id": "</s>"}))
    assert "generation_config.json: eos_token_id" in refusal(directory)


def test_the_length_is_the_checkpoints_unless_a_shorter_one_is_set(tiny: Tiny) -> None:
    assert load(tiny("llama").directory)[0].max_model_len == 256
    assert load(tiny("llama").directory, max_model_len=100)[0].max_model_len == 100
    assert load(tiny("llama_dynamic").directory)[0].max_model_len == 128
    with pytest.raises(ConfigError, match=r"max_model_len is 257.* 256"):
        load(tiny("llama").directory, max_model_len=257)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"num_gpu_blocks_override": 16}, "num_gpu_blocks_override"),
        (
            {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 1000},
            "kv_cache_memory_bytes",
        ),
        (
            {"num_gpu_blocks_override": None, "cpu_memory_utilization": 1e-9},
            "cpu_memory_utilization",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_kv_cache_that_cannot_hold_one_request_says_what_to_raise(
    tiny: Tiny, settings: dict[str, Any], name: str
) -> None:
    with pytest.raises(ConfigError, match=rf"GiB are missing; raise {name}"):
        load(tiny("llama").directory, **settings)
    load(tiny("llama").directory, num_gpu_blocks_override=17)


def test_the_kv_cache_follows_its_settings(tiny: Tiny) -> None:
    bytes_of_a_block = 2 * 2 * 16 * 4 * 16 * 3
    settings: dict[str, Any] = {
        "num_gpu_blocks_override": None,
        "kv_cache_memory_bytes": 40 * bytes_of_a_block,
    }
    assert load(tiny("llama").directory, **settings)[0].runner.num_blocks == 40
    free = load(tiny("llama").directory, num_gpu_blocks_override=None, max_num_seqs=3)[0]
    assert free.runner.num_blocks == 1 + 3 * 16


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_auto_takes_the_checkpoints_type_where_the_processor_is_good_at_it(
    copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, stored: torch.dtype
) -> None:
    directory = copy("llama")
    edit_tensors(
        directory, lambda tensors: tensors.update({k: v.to(stored) for k, v in tensors.items()})
    )
    edit_config(directory, dtype=str(stored).removeprefix("torch."))
    assert load(directory, dtype="auto")[0].dtype == "float32"
    monkeypatch.setattr("tokenmesh.engine.exec.choose_dtype.SMALL_CHECKPOINT_BYTES", 0)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert load(directory, dtype="auto", native_kernels=False)[0].dtype == "float32"
    if has_started():
        expected = "float32" if stored is torch.float32 else "bfloat16"
        assert load(directory, dtype="auto")[0].dtype == expected
    monkeypatch.setattr("tokenmesh.engine.exec.choose_dtype.can_pack", lambda dtype: True)
    expected = "float32" if stored is torch.float32 else "bfloat16"
    assert load(directory, dtype="auto")[0].dtype == expected
    facts = read_facts(read_json(directory / "config.json"))
    model = ModelSettings(model=str(directory))
    assert choose_dtype(model, facts, directory, torch.device("cuda")) is stored


@pytest.mark.parametrize("requested", ["float16", "auto"])
@pytest.mark.parametrize("computed", ["float32", "bfloat16"])
def test_what_stands_for_float16_on_a_cpu_is_logged(
    copy: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    requested: Dtype,
    computed: str,
) -> None:
    directory = copy("llama")
    edit_config(directory, dtype="float16")
    size = 0 if computed == "bfloat16" else 1 << 40
    monkeypatch.setattr("tokenmesh.engine.exec.choose_dtype.SMALL_CHECKPOINT_BYTES", size)
    monkeypatch.setattr("tokenmesh.engine.exec.choose_dtype.can_pack", lambda dtype: True)
    facts = read_facts(read_json(directory / "config.json"))
    model = ModelSettings(model=str(directory), dtype=requested)
    chosen = choose_dtype(model, facts, directory, torch.device("cpu"))
    assert str(chosen) == f"torch.{computed}"
    assert f"float16 is computed in {computed} on a CPU" in caplog.text
    assert ("3 bits" in caplog.text) == (computed == "bfloat16")


def test_loading_reports_its_progress(tiny: Tiny) -> None:
    seen: list[tuple[int, int]] = []
    model = ModelSettings(model=str(tiny("llama").directory))
    build_runner(
        model, WorkerSettings(num_gpu_blocks_override=20), lambda a, b: seen.append((a, b))
    )
    tensors = load_file(tiny("llama").directory / "model.safetensors").values()
    total = sum(tensor.nbytes for tensor in tensors)
    assert [all_bytes for _, all_bytes in seen] == [total] * 4
    done = [done for done, _ in seen]
    assert sorted(set(done[:3])) == done[:3]
    assert 0 < done[0] < done[2] < done[3] == total

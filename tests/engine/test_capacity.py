"""`tokenmesh plan`: its memory is that of workers, and its speeds those of a simulated worker."""

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.engine_driver import EngineDriver
from tests.fakes.ranks import RanksDriver
from tests.fakes.tiny import Tiny
from tokenmesh.engine.capacity.__main__ import PlanQuestion, plan, table
from tokenmesh.engine.capacity.sizes import MAX_RANKS, divisions
from tokenmesh.engine.core.sim import step_seconds
from tokenmesh.engine.plan import StepPlan
from tokenmesh.engine.ranks.pipe import stages_of
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import TokenMeshError

LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}


def llama_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config["vocab_size"], hidden),
    }
    for number in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{number}."
        shapes |= {
            f"{prefix}self_attn.q_proj.weight": (hidden, hidden),
            f"{prefix}self_attn.k_proj.weight": (keys, hidden),
            f"{prefix}self_attn.v_proj.weight": (keys, hidden),
            f"{prefix}self_attn.o_proj.weight": (hidden, hidden),
            f"{prefix}mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}mlp.up_proj.weight": (inner, hidden),
            f"{prefix}mlp.down_proj.weight": (hidden, inner),
            f"{prefix}input_layernorm.weight": (hidden,),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
        }
    return shapes


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A checkpoint of 141 GB in which nothing is written but its header."""
    header, end = {}, 0
    for name, shape in llama_shapes(LLAMA_70B).items():
        size = 2 * int(torch.tensor(shape).prod())
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    return tmp_path


def asked(directory: Path, **more: Any) -> dict[tuple[int, int], dict[str, Any]]:
    question = {"model": {"model": str(directory)}, "worker": {}, **more}
    found = plan(PlanQuestion(**question))
    json.dumps(found)
    return {
        (size["tensor_parallel_size"], size["pipeline_parallel_size"]): size
        for size in found["sizes"]
    }


def test_a_model_of_70_billion_needs_two_devices_of_eight(large: Path) -> None:
    sizes = asked(large, gpus="8xH100", worker={"max_num_batched_tokens": 8192})
    assert sizes[1, 1]["problem"] == "weights take 131.4 GiB of 79.6 GiB"
    # 65.7 GiB of 71.7 leave too little for 131,072 tokens, which advice says
    assert "lower max_model_len to" in sizes[2, 1]["problem"]
    four = sizes[4, 1]
    assert four["workers"] == 2
    assert four["weight_bytes"] == pytest.approx(141.1e9 / 4, rel=0.01)
    assert four["kv_token_bytes"] == 80 * 2 * 2 * 128 * 2
    assert sizes[8, 1]["kv_tokens"] > 2 * four["kv_tokens"]
    assert four["unserved"] == sizes[8, 1]["unserved"] != ""
    # a stage has its layers' KV and a rank its heads': both have a quarter
    assert sizes[1, 4]["kv_token_bytes"] == sizes[2, 2]["kv_token_bytes"] == four["kv_token_bytes"]
    assert sizes[8, 1]["speeds"]["step_ms"] < four["speeds"]["step_ms"]
    assert sizes[1, 8]["speeds"]["step_ms"] > sizes[8, 1]["speeds"]["step_ms"]
    short = asked(large, gpus="8xH100", model={"model": str(large), "max_model_len": 8192})
    assert short[2, 1]["problem"] == ""


@pytest.mark.parametrize("world", [1, 2])
def test_its_memory_is_that_of_a_worker(tiny: Tiny, world: int) -> None:
    directory = tiny("llama").directory
    model = {"model": str(directory), "dtype": "float32"}
    size = asked(directory, model=model, cpus=f"{world}x1GiB")[world, 1]
    driver = EngineDriver(directory) if world == 1 else RanksDriver(directory, world)
    loaded = driver.model
    assert size["kv_token_bytes"] * driver.settings.block_size == loaded.kv_bytes.block
    assert size["weight_bytes"] == pytest.approx(loaded.times.num_bytes, rel=0.02)
    assert size["unserved"] == ""
    if isinstance(driver, RanksDriver):
        driver.close()


def test_a_simulated_worker_with_its_settings_is_as_fast(large: Path) -> None:
    for size in asked(large, gpus="8xH200").values():
        if size["problem"]:
            continue
        speeds = size["speeds"]
        settings = WorkerSettings(engine="sim", **speeds["sim"])
        stages = size["pipeline_parallel_size"]
        rows = speeds["streams"] // stages * stages
        step_s = step_seconds(StepPlan(step=0, decodes=list(range(rows))), settings)
        assert speeds["tokens_per_s"] == pytest.approx(size["workers"] * rows / step_s, rel=0.01)


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({}, "either --gpus, such as 8xH100, or --cpus"),
        ({"gpus": "8xH100", "cpus": "2x64"}, "either --gpus"),
        ({"gpus": "8xH1000"}, "H1000 is unknown; known are B200"),
        ({"gpus": "0xH100"}, "give a number and a device"),
        ({"gpus": "x"}, "x is unknown"),
        ({"gpus": "4x48GiB"}, "needs --bandwidth and --tflops"),
        ({"cpus": "2xH100"}, "give the free memory of each"),
        ({"cpus": "2x0GiB"}, "give the free memory of each"),
        ({"gpus": "T4", "worker": {"kv_cache_dtype": "int8"}}, "int8 is served on a CPU only"),
        ({"gpus": "T4", "model": {"model": "/none/there"}}, "/none/there"),
    ],
)
def test_what_cannot_be_planned_is_named(tiny: Tiny, more: dict[str, Any], problem: str) -> None:
    question = {"model": {"model": str(tiny("llama").directory)}, "worker": {}, **more}
    with pytest.raises(TokenMeshError, match=problem):
        plan(PlanQuestion(**question))


def test_what_cannot_be_divided_says_why(tiny: Tiny) -> None:
    sizes = asked(tiny("llama").directory, gpus="24xT4")
    assert "query heads are not divisible by 3 ranks" in sizes[3, 1]["problem"]
    assert "layers are fewer than 24 stages" in sizes[1, 24]["problem"]


def test_the_command_prints_a_table_and_json(tiny: Tiny) -> None:
    directory = str(tiny("llama").directory)
    command = [sys.executable, "-m", "tokenmesh", "plan", directory, "--gpus", "2xL4"]
    command += ["--max-model-len", "32"]
    made = subprocess.run([*command, "--format", "json"], capture_output=True, check=True)
    found = json.loads(made.stdout)
    assert found["max_model_len"] == 32
    text = table(found)
    assert "a cost model" in text
    assert len(text.splitlines()) == 4 + len(found["sizes"]) + 3
    refused = subprocess.run([*command[:5], "--gpus", "2xL99"], capture_output=True, check=False)
    assert refused.returncode == 2
    assert b"L99 is unknown" in refused.stderr


@given(st.integers(1, 200), st.integers(1, 64))
def test_stages_have_all_layers_once(num_layers: int, stages: int) -> None:
    parts = stages_of(num_layers, stages)
    assert [number for part in parts for number in part] == list(range(num_layers))
    lengths = [len(part) for part in parts]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


@given(st.integers(1, 128))
def test_divisions_use_all_devices(count: int) -> None:
    found = list(divisions(count))
    assert found[0] == (1, 1)
    assert len(set(found)) == len(found)
    assert all(count % (ranks * stages) == 0 and ranks <= MAX_RANKS for ranks, stages in found)

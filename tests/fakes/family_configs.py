"""config.json as a checkpoint has it, with transformers' own reading of it as the oracle."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.fakes.engine_driver import greedy
from tests.fakes.models import randomized
from tests.fakes.tiny import TinyCheckpoint
from tests.ops.native import FOLDER
from tokenmesh.engine.exec.inputs import build_inputs
from tokenmesh.engine.exec.rows import HostRows
from tokenmesh.engine.models.checkpoint import Checkpoint
from tokenmesh.engine.models.kv_store import make_store
from tokenmesh.engine.models.native.build_decoder import build_decoder
from tokenmesh.engine.models.native.decoder import Decoder
from tokenmesh.engine.models.native.read_config import read_facts
from tokenmesh.engine.models.raw_config import read_json
from tokenmesh.engine.plan import NewRow, ScheduledRow
from tokenmesh.kernels import native as native_kernels

SIZES: Final[Mapping[str, Any]] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

MODEL_TYPES: Final[Mapping[str, str]] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MinistralForCausalLM": "ministral",
    "Ministral3ForCausalLM": "ministral3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Phi3ForCausalLM": "phi3",
    "SmolLM3ForCausalLM": "smollm3",
    "GraniteForCausalLM": "granite",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "GlmForCausalLM": "glm",
    "Glm4ForCausalLM": "glm4",
    "SeedOssForCausalLM": "seed_oss",
    "HunYuanDenseV1ForCausalLM": "hunyuan_v1_dense",
    "Exaone4ForCausalLM": "exaone4",
}
"""By architecture, as config.json has it."""


_GROUPED_EXPERTS: Final = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_group": 2,
    "topk_group": 1,
}
OTHERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "Gemma2ForCausalLM": {"model_type": "gemma2", "sliding_window": 8},
    "Gemma3ForCausalLM": {"model_type": "gemma3_text", "sliding_window": 8},
    "Glm4MoeForCausalLM": {"model_type": "glm4_moe", **_GROUPED_EXPERTS},
    "Cohere2ForCausalLM": {"model_type": "cohere2", "sliding_window": 8},
    "StableLmForCausalLM": {"model_type": "stablelm"},
}
"""Architectures that the native kind does not have."""


def other_config(architecture: str) -> dict[str, Any]:
    """A small config.json of one of OTHERS."""
    return {"architectures": [architecture], **SIZES, **OTHERS[architecture]}


def config_of(architecture: str, **values: Any) -> dict[str, Any]:
    """A small config.json; None as a value stands for null."""
    model_type = MODEL_TYPES[architecture]
    return {"architectures": [architecture], "model_type": model_type, **SIZES, **values}


def checkpoint_of(directory: Path, config: dict[str, Any]) -> TinyCheckpoint:
    """A checkpoint with this very config.json, and what transformers makes of it."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "config.json"
    path.write_text(json.dumps(config))

    def make() -> Any:
        read = AutoConfig.from_pretrained(directory)
        return randomized(AutoModelForCausalLM.from_config(read).float())

    make().save_pretrained(directory)
    # transformers has written its own reading of it
    path.write_text(json.dumps(config))
    (directory / "generation_config.json").unlink(missing_ok=True)
    return TinyCheckpoint(directory, make)


def logits_of(directory: Path, prompt: list[int], *, native: bool, chunk: int) -> torch.Tensor:
    """Ours at every position, float32 [len(prompt), vocab]."""
    native = native and native_kernels.start(1, 0, FOLDER)
    facts, weights = read_facts(read_json(directory / "config.json")), Checkpoint(directory)
    decoder = build_decoder(facts, weights, torch.float32, lambda done, total: None, native)
    return decoder_logits(decoder, prompt, chunk)


def decoder_logits(decoder: Decoder, prompt: list[int], chunk: int) -> torch.Tensor:
    """At every position, float32 [len(prompt), vocab]."""
    num_blocks = -(-len(prompt) // 16)
    logits = []
    with torch.inference_mode():
        cpu = torch.device("cpu")
        grouping, dtype = decoder.grouping, decoder.dtype
        num_windowed = len(grouping.windows) - 1
        all_blocks = 1 + num_blocks * (1 + num_windowed)
        store = make_store(decoder.keeps, all_blocks, 16, 1, dtype, cpu, grouping)
        store.clear_blocks(torch.arange(all_blocks))
        rows = HostRows(1, num_blocks, decoder.facts, num_windowed)
        rows.add(NewRow(0, prompt, len(prompt), greedy(1), [], False))
        first, *windowed = torch.arange(1, all_blocks).view(-1, num_blocks).tolist()
        rows.append_windowed(0, windowed)
        for start in range(0, len(prompt), chunk):
            count = min(chunk, len(prompt) - start)
            blocks = [] if start else first
            entry = ScheduledRow(0, start, count, blocks, start + count == len(prompt))
            rows.schedule(entry)
            inputs = build_inputs([entry], rows, 16)
            hidden = decoder.embed(inputs.token_ids)
            logits.append(decoder.logits(decoder.forward(hidden, inputs.step, store)))
    return torch.cat(logits)

"""GritLM: tokens that see each other, and a mean that leaves the instruction out."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, processors
from torch.nn.functional import normalize

from tests.fakes.engine_driver import EngineDriver, Job, greedy
from tests.fakes.pool_driver import PoolDriver
from tests.fakes.poolers import DECODERS, make_pooler, write_json
from tests.fakes.tokenizers import byte_level_bpe
from tokenmesh.engine.exec.build_any import build
from tokenmesh.engine.models.pooling.kind import read_pooling
from tokenmesh.engine.models.raw_config import RawConfig
from tokenmesh.services.worker_svc.pooling.admission import admit_pool
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import CheckpointError, InvalidInput
from tokenmesh.shared.ids import GatewayId, ModelName, RequestId
from tokenmesh.shared.messages.pooling import Pool, PoolingParams, PoolItem
from tokenmesh.shared.tokens import pack_ids

EMBED = PoolingParams(task="embed")
INSTRUCTION = "<|user|>\nFind the fox\n<|embed|>\n"
PROMPTS = [
    (INSTRUCTION, "The quick brown fox"),
    ("<|embed|>\n", "jumps over the lazy dog"),
    ("", "The quick brown fox"),
    (INSTRUCTION, "jumps\n<|embed|>\nover the lazy dog " * 3),
]
"""Instructions and texts."""


def checkpoint(directory: Path, **config: Any) -> Any:
    """Its files, and transformers' model, whose own attention is causal."""
    byte_level_bpe(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    model = make_pooler(DECODERS["mistral"], "ForCausalLM", vocab_size=512)
    model.save_pretrained(directory)
    write_json(directory / "config.json", {**model.config.to_dict(), **config})
    return model, tokenizer


@torch.inference_mode()
def expected(model: Any, tokenizer: Any, instruction: str, text: str) -> torch.Tensor:
    """As GritLM's own code embeds: a mask of all tokens, and none of the instruction's states."""
    ids = tokenizer.encode(instruction + text).ids
    model.config.sliding_window = None
    mask = torch.zeros(1, 1, len(ids), len(ids))
    states = model.model(input_ids=torch.tensor([ids]), attention_mask=mask).last_hidden_state[0]
    num_left_out = len(tokenizer.encode(instruction).ids) if instruction else 0
    return normalize(states[num_left_out:].mean(dim=0), dim=0)


STATED: list[dict[str, Any]] = [
    {"architectures": ["GritLM"]},
    {
        "architectures": ["MistralForCausalLM"],
        "auto_map": {"AutoModel": "modeling_gritlm7b.MistralModel"},
    },
]


@pytest.mark.parametrize("config", STATED, ids=["architecture", "code"])
def test_embeddings_leave_the_instruction_out(tmp_path: Path, config: dict[str, Any]) -> None:
    model, tokenizer = checkpoint(tmp_path, **config)
    driver = PoolDriver(tmp_path, model={"runner": "pooling"})
    ids = [tokenizer.encode(instruction + text).ids for instruction, text in PROMPTS]
    for (instruction, text), numbers in zip(PROMPTS, driver.run(ids), strict=True):
        wanted = expected(model, tokenizer, instruction, text)
        np.testing.assert_allclose(numbers, wanted.numpy(), atol=2e-5)
    whole, part = (expected(model, tokenizer, each, PROMPTS[0][1]) for each in ("", INSTRUCTION))
    assert float((whole - part).norm()) > 0.1
    (tokens,) = driver.run(ids[:1], PoolingParams(task="token_embed"))
    assert len(tokens) == len(ids[0])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<|user|>\nFind the fox\n", "its instruction does not end"),
        (INSTRUCTION, "holds no text"),
        ("<|embed|>\n", "holds no text"),
    ],
)
async def test_an_instruction_alone_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    _, tokenizer = checkpoint(tmp_path, **STATED[0])
    driver = PoolDriver(tmp_path)
    items = [PoolItem(prompt_ids=pack_ids(tokenizer.encode(each).ids)) for each in ("a", text)]
    message = Pool(
        request_id=RequestId("r"),
        model=ModelName("m"),
        gateway=GatewayId("g"),
        stream=1,
        epoch=1,
        items=items,
        params=EMBED,
    )
    with pytest.raises(InvalidInput, match=f"item 1: .*{problem}"):
        await admit_pool(message, driver.loaded, 16)


def test_other_shapes_are_refused_by_name(tmp_path: Path) -> None:
    raw = RawConfig({**STATED[0], "model_type": "mixtral", "hidden_size": 8}, "config.json")
    with pytest.raises(CheckpointError, match="supported as mistral only"):
        read_pooling(ModelSettings(model="m"), raw, tmp_path)


def test_the_same_checkpoint_generates_with_causal_attention(tmp_path: Path) -> None:
    model, tokenizer = checkpoint(tmp_path, **STATED[1])
    prompt = tokenizer.encode("The quick brown fox").ids
    given = torch.tensor([prompt])
    with torch.inference_mode():
        # one of the ids is that of padding, which generate would mask
        wanted = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=None,
        )[0, len(prompt) :].tolist()
    (outcome,) = EngineDriver(tmp_path).run([Job(prompt, greedy(24))])
    assert outcome.token_ids == wanted


def test_a_checkpoint_that_only_states_gritlm_does_not_generate(tmp_path: Path) -> None:
    checkpoint(tmp_path, **STATED[0])
    settings = ModelSettings(model=str(tmp_path), runner="generate")
    with pytest.raises(CheckpointError, match="GritLM"):
        build(settings, WorkerSettings(device="cpu"), lambda done, total: None)

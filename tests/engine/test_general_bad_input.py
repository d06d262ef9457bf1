"""The general kind refuses bad checkpoints when it loads them; each error names file and key."""

import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fakes.engine_driver import EngineDriver, Job, greedy
from tests.fakes.general_models import GENERAL, HEADS, make_general
from tests.fakes.models import Fake, make_fake
from tests.fakes.tiny import Tiny, prompt_of
from tokenmesh.engine.models.load import read_model_facts
from tokenmesh.engine.models.raw_config import read_json
from tokenmesh.shared.config.model import ModelImpl, ModelSettings
from tokenmesh.shared.errors import CheckpointError

Tensors = dict[str, torch.Tensor]

QUERY: Final = "model.layers.0.self_attn.q_proj.weight"
GATE: Final = "model.layers.1.mlp.experts.3.gate_proj.weight"

OWN_CODE: Final = """
from transformers import LlamaConfig, LlamaForCausalLM

class MineConfig(LlamaConfig):
    model_type = "mine"

class MineForCausalLM(LlamaForCausalLM):
    config_class = MineConfig
"""


@pytest.fixture
def directory(tiny: Tiny, tmp_path: Path) -> Path:
    """A checkpoint that a test may damage."""
    copied = tmp_path / "model"
    shutil.copytree(tiny("qwen3_moe").directory, copied)
    return copied


def edit_config(directory: Path, **values: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def refusal(directory: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        EngineDriver(directory, model_impl="transformers")
    return error.value.message.replace(f"{directory}", "DIR")


@pytest.mark.parametrize("name", ["gemma2", "qwen3_moe"])
def test_a_config_of_another_family_is_refused(tiny: Tiny, tmp_path: Path, name: str) -> None:
    shutil.copytree(tiny(name).directory, tmp_path / "model")
    edit_config(tmp_path / "model", model_type="mistral")
    assert re.search(r"model_type is 'mistral', but \w+ takes '\w+'", refusal(tmp_path / "model"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t.pop(QUERY), f"DIR: missing tensors: {QUERY}"),
        (lambda t: t.pop(GATE), f"DIR: missing tensors: {GATE}"),
        (
            lambda t: t.update({QUERY: t[QUERY][:-1].clone()}),
            f"DIR/model.safetensors: tensor {QUERY} has shape [63, 64]; "
            "config.json asks for [64, 64]",
        ),
        (
            lambda t: t.update({GATE: t[GATE][:-1].clone()}),
            f"DIR/model.safetensors: tensor {GATE} has shape [23, 64]; "
            "config.json asks for [24, 64]",
        ),
        (lambda t: t.update(more=torch.ones(3)), "DIR/model.safetensors: unexpected tensors: more"),
        (
            lambda t: t.update({GATE.replace(".3.", ".8."): t[GATE].clone()}),
            f"DIR/model.safetensors: unexpected tensors: {GATE.replace('.3.', '.8.')}",
        ),
        (
            lambda t: t.update({QUERY: t[QUERY].to(torch.int8)}),
            f"DIR/model.safetensors: tensor {QUERY} has type I8; supported are F32, F16, BF16",
        ),
    ],
    ids=["missing", "expert", "shape", "expert_shape", "extra", "extra_expert", "type"],
)
def test_tensors_that_are_not_those_of_the_config_are_named(
    directory: Path, damage: Callable[[Tensors], object], message: str
) -> None:
    tensors = load_file(directory / "model.safetensors")
    damage(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    assert refusal(directory) == message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"vocab_size": 150}, "lm_head.weight has shape [160, 64]; config.json asks for [150, 64]"),
        ({"num_attention_heads": 8}, "o_proj.weight has shape [64, 64]; config.json asks for"),
        ({"num_local_experts": 9}, "down_proj has shape [8, 64, 24]; config.json asks for [9,"),
        ({"num_local_experts": 7}, "down_proj has shape [8, 64, 24]; config.json asks for [7,"),
        ({"num_hidden_layers": 2}, "DIR/model.safetensors: unexpected tensors: model.layers.2."),
        ({"num_hidden_layers": 4}, "DIR: missing tensors: model.layers.3."),
        ({"hidden_size": "64"}, "Validation error for field 'hidden_size'"),
        ({"hidden_act": "wobble"}, "DIR/config.json: hidden_act is 'wobble', which Qwen3MoeFor"),
        (
            {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}},
            "DIR/config.json: rope_parameters: rope_type is 'spiral', which Qwen3MoeForCausalLM",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
            "Missing required keys in `rope_parameters` for 'rope_type'='yarn': {'factor'}",
        ),
        ({"architectures": ["MineForCausalLM"]}, "MineForCausalLM cannot be served: transformers"),
        (
            {"model_type": "llama"},
            "model_type is 'llama', but Qwen3MoeForCausalLM takes 'qwen3_moe'",
        ),
        ({"quantization_config": {"quant_method": "gptq"}}, "DIR/config.json: quantization_config"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_configs_that_contradict_the_tensors_or_say_unknown_things_are_named(
    directory: Path, values: dict[str, Any], message: str
) -> None:
    edit_config(directory, **values)
    assert message in refusal(directory)


@pytest.fixture
def own_code(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A llama whose class is the checkpoint's own."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hub"))
    directory = tmp_path / "mine"
    shutil.copytree(tiny("llama").directory, directory)
    (directory / "mine.py").write_text(OWN_CODE)
    auto_map = {"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.MineForCausalLM"}
    edit_config(directory, model_type="mine", architectures=["MineForCausalLM"], auto_map=auto_map)
    return directory


def test_code_of_a_checkpoint_is_not_imported_by_default(own_code: Path) -> None:
    (own_code / "mine.py").write_text("raise SystemExit('imported')")
    assert refusal(own_code) == (
        "DIR/config.json: auto_map names code of the checkpoint's own, "
        "which only --trust-remote-code runs"
    )


def test_code_of_a_checkpoint_runs_when_trusted_and_is_logged(
    tiny: Tiny, own_code: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = prompt_of(20)
    with caplog.at_level(logging.WARNING):
        driver = EngineDriver(own_code, model_impl="transformers", trust_remote_code=True)
    assert f"running code of the checkpoint: mine.MineForCausalLM of {own_code}" in caplog.text
    assert driver.tokens([Job(prompt, greedy(8))]) == tiny("llama").greedy([prompt], 8)


def test_a_class_that_transformers_has_needs_no_code_of_the_checkpoint(directory: Path) -> None:
    (directory / "mine.py").write_text("raise SystemExit('imported')")
    edit_config(directory, auto_map={"AutoModelForCausalLM": "mine.MineForCausalLM"})
    EngineDriver(directory, model_impl="transformers")


@pytest.mark.parametrize(
    ("name", "rotary"),
    [("deepseek_v2", "DeepseekV2RotaryEmbedding"), ("gpt_oss", "GptOssRotaryEmbedding")],
)
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_rope_by_length_of_another_form_is_refused_by_its_name(
    tiny: Tiny, tmp_path: Path, name: str, rotary: str, kind: str
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(tiny(name).directory, directory)
    width = 8 if name == "deepseek_v2" else 16
    factors = {f"{each}_factor": [1.5] * (width // 2) for each in ("short", "long")}
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, **factors}
    edit_config(directory, rope_parameters=rope, rope_scaling=None)
    problem = f"its rope depends on the length ({kind}) and {rotary} has its own form"
    assert refusal(directory).endswith(f"cannot be served: {problem}")


def test_code_that_fails_is_a_refusal(own_code: Path) -> None:
    (own_code / "mine.py").write_text("import a_module_that_is_not_there")
    with pytest.raises(CheckpointError, match="a_module_that_is_not_there"):
        EngineDriver(own_code, model_impl="transformers", trust_remote_code=True)


def write_tokenizer(
    directory: Path, vocab: dict[str, int] | list[Any], added: list[int], special: bool = True
) -> None:
    tokens = [{"id": each, "content": f"<{each}>", "special": special} for each in added]
    text = json.dumps({"model": {"vocab": vocab}, "added_tokens": tokens})
    (directory / "tokenizer.json").write_text(text)


@pytest.mark.parametrize(
    "vocab",
    [
        {f"t{number}": number for number in range(161)},
        [[f"t{number}", 0.0] for number in range(161)],
    ],
    ids=["object", "list"],
)
def test_a_tokenizer_with_more_ids_than_the_embedding_has_rows_is_refused(
    directory: Path, vocab: dict[str, int] | list[Any]
) -> None:
    write_tokenizer(directory, vocab, [])
    assert refusal(directory) == (
        "DIR/tokenizer.json: model.vocab has ids up to 160; the embedding of DIR has 160 rows"
    )


@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_an_added_token_that_text_makes_is_refused_where_the_embedding_lacks_it(
    tiny: Tiny, tmp_path: Path, impl: ModelImpl
) -> None:
    shutil.copytree(tiny("llama").directory, tmp_path / "model")
    vocab = {f"t{number}": number for number in range(160)}
    write_tokenizer(tmp_path / "model", vocab, [159, 160, 161], special=False)
    with pytest.raises(CheckpointError) as error:
        EngineDriver(tmp_path / "model", model_impl=impl)
    assert error.value.message == (
        f"{tmp_path}/model/tokenizer.json: added_tokens has <160> (160), <161> (161); "
        f"the embedding of {tmp_path}/model has 160 rows"
    )


def test_a_placeholder_of_media_may_lie_past_the_embedding(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit_config(directory, image_token_id=160)
    vocab = {f"t{number}": number for number in range(160)}
    write_tokenizer(directory, vocab, [160], special=False)
    with caplog.at_level(logging.WARNING):
        EngineDriver(directory, model_impl="transformers")
    assert "has 160 rows, so requests with <160> (160) are refused" in caplog.text


def test_special_tokens_past_the_embedding_are_logged_and_refused_in_requests(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tokenizer(directory, {f"t{number}": number for number in range(160)}, [159, 160])
    with caplog.at_level(logging.WARNING):
        driver = EngineDriver(directory, model_impl="transformers")
    assert "has 160 rows, so requests with <160> (160) are refused" in caplog.text
    (outcome,) = driver.run([Job([5, 160], greedy(2))])
    assert outcome.error == "token id 160 is not in the vocabulary of 160"


@pytest.mark.parametrize(
    ("fake", "problem"),
    [
        (GENERAL["deepseek_v3"], "latents of 16 and 8 features do not run on a GPU"),
        (Fake("Llama", {"head_dim": 24}), "heads of 24 features do not run on a GPU"),
        (
            Fake("Mamba", {"state_size": 8, "expand": 2, "time_step_rank": 8}),
            "its MambaMixer keeps a state that no kernel of a GPU computes",
        ),
    ],
    ids=lambda value: value.family if isinstance(value, Fake) else "",
)
def test_what_a_gpu_does_not_run_is_named_before_weights_are_read(
    fake: Fake, problem: str, tmp_path: Path
) -> None:
    make_fake(fake, HEADS).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    settings = ModelSettings(model=str(tmp_path), model_impl="transformers")
    found = read_model_facts(read_json(tmp_path / "config.json"), tmp_path, settings).gpu_problem()
    assert found is not None
    assert found.startswith(problem)


def test_ties_of_an_indexer_are_named_where_they_change_what_chunks_compute(tmp_path: Path) -> None:
    model = make_general("deepseek_v32", {"index_topk": 8})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "indexer.weights_proj" in name:
                parameter.zero_()  # all tokens score the same
    model.save_pretrained(tmp_path)
    assert "its indexer may score tokens equally, and which of such ties" in refusal(tmp_path)

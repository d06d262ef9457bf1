"""Every architecture of GGUF files, against transformers on the checkpoint that was converted."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from tests.engine.test_gguf import bytes_tokens, refusal
from tests.fakes import gguf
from tests.fakes.engine_driver import EngineDriver, Job
from tests.fakes.gguf_families import FAMILIES
from tests.fakes.gguf_joined import mxfp4
from tests.fakes.models import classes, make_fake
from tests.fakes.tiny import prompt_of
from tokenmesh.engine.exec.build import build_runner
from tokenmesh.engine.models.native.read_config import NativeFacts
from tokenmesh.engine.models.native.registry import UNPACKED_FAMILIES
from tokenmesh.engine.models.tree.check import paged_results
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.gguf.unpack import unpacked
from tokenmesh.shared.messages.sampling import SamplingParams

VOCABULARY: Final = {"vocab_size": 320}
SCORED: Final = SamplingParams(seed=0, max_tokens=8, temperature=0.0, prompt_logprobs=1)
PROMPT: Final = [number % 300 for number in prompt_of(40)]
Encode = Callable[[str, torch.Tensor], gguf.Encoded]


def plain(name: str, weight: torch.Tensor) -> gguf.Encoded:
    return gguf.plain(weight)


def small(name: str, weight: torch.Tensor) -> gguf.Encoded:
    """In blocks, where they divide; experts in one tensor as gpt-oss has them."""
    if weight.ndim == 3:
        return mxfp4(weight)
    return gguf.q8_0(weight) if weight.shape[-1] % 32 == 0 else gguf.half(weight)


def written(tmp_path: Path, name: str, encode: Encode, **values: Any) -> tuple[Path, Any]:
    """A file, and the model of transformers with the numbers that it stands for."""
    family = FAMILIES[name]
    model = make_fake(family.fake, VOCABULARY)
    model.save_pretrained(tmp_path / "source")
    file = tmp_path / "model.gguf"
    tokens = {**bytes_tokens(320), **values}
    stands_for = gguf.write_model(tmp_path / "source", file, name, encode, tokens)
    path = tmp_path / "source" / "model.safetensors"
    save_file({key: each.contiguous() for key, each in stands_for.items()}, path, {"format": "pt"})
    source = classes(family.fake)[1].from_pretrained(tmp_path / "source", dtype=torch.float32)
    return file, source.eval()


def check(directory: Path, model: Any, most: float = 2e-4) -> None:
    (result,) = EngineDriver(directory).run([Job(PROMPT, SCORED)])
    assert result.error is None
    assert result.prompt_logprobs is not None
    ours = torch.tensor([each.logprob for each in result.prompt_logprobs if each is not None])
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT])).logits[0].float()
        whole = model.generate(
            torch.tensor([PROMPT]),
            **{"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0},
        )
    expected = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    torch.testing.assert_close(ours, expected, atol=most, rtol=0)
    assert result.token_ids == whole[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_computes_what_transformers_does(tmp_path: Path, name: str) -> None:
    file, model = written(tmp_path, name, plain)
    check(unpacked(file, str(tmp_path / "cache")), model)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("gemma3", "gpt-oss") else pytest.mark.slow)
        for name in FAMILIES
    ],
)
def test_a_family_is_read_from_blocks(tmp_path: Path, name: str) -> None:
    file, model = written(tmp_path, name, small)
    check(unpacked(file, str(tmp_path / "cache")), model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_native_family_of_files_is_bit_for_bit_its_promoted_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: Any
) -> None:
    monkeypatch.setitem(VOCABULARY, "hidden_size", 96)  # whose root is rounded
    assert set(UNPACKED_FAMILIES) == {"Gemma3ForCausalLM"}
    file, _ = written(tmp_path, "gemma3", small)
    directory = str(unpacked(file, str(tmp_path / "cache")))
    found, embedded, logits = [], [], []
    for impl in ("auto", "transformers"):
        settings = ModelSettings(model=directory, model_impl=impl, dtype=dtype)
        model = build_runner(settings, WorkerSettings(num_gpu_blocks_override=999), Mock())
        found.append((type(model.facts), model.max_model_len, model.facts.max_position))
        decoder: Any = model.resident._model

        def compute(ids: Any, step: Any, store: Any, decoder: Any = decoder) -> torch.Tensor:
            out: torch.Tensor = decoder.logits(decoder.forward(decoder.embed(ids), step, store))
            return out

        with torch.inference_mode():
            embedded.append(decoder.embed(torch.arange(320)))
            logits.append(paged_results(compute, decoder, torch.device("cpu")))
    assert found[0][0] is NativeFacts
    assert found[0][1:] == found[1][1:]
    assert torch.equal(*embedded)
    # a tree rounds norms to its type, and so differs in bfloat16
    assert dtype != "float32" or torch.equal(*logits)


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("gemma3", {"gemma3.attn_logit_softcapping": 50.0}, "attn_logit_softcapping is set (50.0)"),
        ("gemma3", {"gemma3.attention.causal": False}, "gemma3.attention.causal is set (False)"),
        ("gemma2", {"gemma2.rope.freq_base_swa": 5.0}, "rope.freq_base_swa is 5.0, which is not"),
        (
            "olmo3",
            {"olmo2.attention.sliding_window_pattern": [True, False]},
            "olmo2.attention.sliding_window_pattern has 2 values for 4 layers",
        ),
        ("granite", {"granite.expert_count": 4}, "granite.expert_count is set, which is not"),
        ("granite", {"granite.attention.sliding_window": 9}, "attention.sliding_window is set (9)"),
        ("glm4", {"glm4.rope.scaling.factor": 2.0}, "factor is 2.0 without rope.scaling.type"),
        ("glm4", {"glm4.nextn_predict_layers": 1}, "glm4.nextn_predict_layers is set (1)"),
        ("olmo2", {"olmo2.rope.dimension_count": 8}, "dimension_count is 8, not that of a head"),
        ("phi3", {"phi3.rope.scaling.attn_factor": 1.2}, "rope.scaling.attn_factor is set (1.2"),
        (
            "olmo3",
            {"olmo2.rope.scaling.yarn_log_multiplier": 0.1},
            "rope.scaling.yarn_log_multiplier is set (0.1",
        ),
        ("stablelm", {"stablelm.use_parallel_residual": True}, "use_parallel_residual is set"),
        ("gpt-oss", {"gpt-oss.expert_gating_func": 2}, "expert_gating_func is 2; supported is 1"),
        ("gpt-oss", {"gpt-oss.expert_count": 4}, "has shape [8, 96, 64] for 4 experts"),
        ("gemma", {"general.type": "mmproj"}, "name the file of its language model"),
        ("gemma", {"general.type": "adapter"}, "general.type is 'adapter'"),
    ],
)
def test_keys_that_would_change_the_result_are_named(
    tmp_path: Path, name: str, values: dict[str, Any], expected: str
) -> None:
    file, _ = written(tmp_path, name, plain, **values)
    assert expected in refusal(tmp_path, file.read_bytes())


def test_the_largest_gemma_3_scales_queries_by_its_width(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no key for the scale: files of 62 layers are those of 27B."""
    sizes = {"num_hidden_layers": 62, "hidden_size": 96, "query_pre_attn_scalar": 24}
    family = FAMILIES["gemma3"]
    fake = replace(family.fake, sizes={**family.fake.sizes, **sizes})
    monkeypatch.setitem(cast("Any", FAMILIES), "gemma3", replace(family, fake=fake))
    file, model = written(tmp_path, "gemma3", small)
    directory = unpacked(file, str(tmp_path / "cache"))
    config = json.loads((directory / "config.json").read_text())
    assert config["query_pre_attn_scalar"] == 24 != config["head_dim"]
    assert config["quantization_config"]  # a native family, for its weights are in blocks
    check(directory, model, 2e-3)  # of 62 layers


def test_layers_with_a_window_may_be_listed(tmp_path: Path) -> None:
    pattern = {"olmo2.attention.sliding_window_pattern": [True, True, True, False]}
    file, model = written(tmp_path, "olmo3", plain, **pattern)
    check(unpacked(file, str(tmp_path / "cache")), model)


WORDS: Final = {
    "llama-bpe": ["It", "'s", " ", "123", "456", "7", " CamelCase", " a", "/b", "!!\n\n"],
    "qwen2": ["It", "'s", " ", *"1234567", " CamelCase", " a", "/b", "!!\n\n"],
    "gpt-4o": ["It's", " ", "123", "456", "7", " Camel", "Case", " a", "/b", "!!\n\n"],
    "tekken": ["It", "'s", " ", *"1234567", " Camel", "Case", " a", "/b", "!!\n\n"],
    "gpt-2": ["It", "'s", " 1234567", " CamelCase", " a", "/", "b", "!!", "\n\n"],
    "smollm": ["It", "'s", " ", *"1234567", " CamelCase", " a", "/", "b", "!!", "\n\n"],
    "deepseek-v3": ["It", "'s", " ", "123", "456", "7", " CamelCase", " a", "/b", "!!\n\n"],
    "falcon": ["It", "'", "s", " ", "123", "456", "7", " CamelCase", " a", "/", "b", "!!", "\n\n"],
}


@pytest.mark.parametrize("name", WORDS)
def test_text_is_cut_as_the_pre_tokenizer_says(tmp_path: Path, name: str) -> None:
    file, _ = written(tmp_path, "granite", plain, **{"tokenizer.ggml.pre": name})
    directory = unpacked(file, str(tmp_path / "cache"))
    cut = Tokenizer.from_file(str(directory / "tokenizer.json")).pre_tokenizer
    text = "It's 1234567 CamelCase a/b!!\n\n"
    found = [text[first:last] for _, (first, last) in cut.pre_tokenize_str(text)]
    assert found == WORDS[name]


def test_all_tokens_that_end_an_answer_are_known(tmp_path: Path) -> None:
    names = {"<|im_end|>": 3, "<|endoftext|>": 3, "<eos>": 1}
    tokens = bytes_tokens(320)
    words, kinds = tokens["tokenizer.ggml.tokens"], tokens["tokenizer.ggml.token_type"]
    for number, (word, kind) in enumerate(names.items(), start=300):
        words[number], kinds[number] = word, kind
    tokens["tokenizer.ggml.eot_token_id"] = 310
    file, _ = written(tmp_path, "granite", plain, **tokens)
    config = json.loads((unpacked(file, str(tmp_path / "c")) / "config.json").read_text())
    assert config["eos_token_id"] == [words.index("<|end|>"), 310, 300, 301]

"""Adapters that PEFT itself has written: the engine equals PEFT's model, or refuses by name."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from tests.fakes.engine_driver import EngineDriver, Job, greedy
from tests.fakes.general_models import make_general
from tests.fakes.models import make_model
from tests.fakes.pool_driver import PoolDriver
from tests.fakes.poolers import DECODERS, ENCODERS, make_pooler, prompts, write_modules
from tests.fakes.tiny import Tiny, prompt_of
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.messages.pooling import PoolingParams

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT warns of much that it does
peft: Any = pytest.importorskip("peft", reason="PEFT is not installed")

LORA: Final = {"enable_lora": True, "max_lora_rank": 16}
NUM_TOKENS: Final = 10
ALL: Final = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SERVED: Final[Mapping[str, dict[str, Any]]] = {
    "plain": {"target_modules": ALL, "r": 4, "lora_alpha": 8},
    "rank stabilized": {"target_modules": ALL, "r": 9, "lora_alpha": 4, "use_rslora": True},
    "patterns": {
        "target_modules": ALL,
        "r": 4,
        "lora_alpha": 8,
        "rank_pattern": {"down_proj": 7, "^model.layers.0.self_attn.q_proj": 2},
        "alpha_pattern": {"layers.1.mlp.up_proj": 5, "v_proj": 3},
    },
    "expressions": {
        "target_modules": r"^(?!.*layers\.2\.).*(?:[qv]_proj|mlp\.\w+_proj)",
        "exclude_modules": r".*\.1\.mlp\.(gate|up)_proj",
        "r": 4,
        "rank_pattern": {r".*\.(?:0|2)\.self_attn\.q_proj": 2, r"mlp\.\w+": 3},
        "alpha_pattern": {r"layers\.\d+\.mlp\.(?!down).*": 5},
        "use_rslora": True,
    },
    "layers by number": {
        "target_modules": ALL,
        "exclude_modules": ["model.layers.2.mlp.up_proj", "k_proj"],
        "layers_to_transform": [0, 2],
        "layers_pattern": "layers",
    },
    "all linear layers": {"target_modules": "all-linear", "r": 3, "lora_alpha": 6},
    "some layers": {"target_modules": r".*\.1\.self_attn\.(q|v)_proj", "r": 16, "lora_alpha": 16},
    "transposed": {"target_modules": ALL, "r": 4, "fan_in_fan_out": True},
    "starts orthogonal": {"target_modules": ALL, "r": 4, "init_lora_weights": "orthogonal"},
}
REFUSED: Final[Mapping[str, tuple[dict[str, Any], str]]] = {
    "DoRA": ({"target_modules": ALL, "use_dora": True}, "use_dora is True: DoRA is not served"),
    "a saved head": (
        {"target_modules": ALL, "modules_to_save": ["lm_head"]},
        r"modules_to_save is \['lm_head'\]: whole modules",
    ),
    "a head": (
        {"target_modules": [*ALL, "lm_head"]},
        "lm_head.* adapters of heads are not served",
    ),
    "an embedding": (
        {"target_modules": [*ALL, "embed_tokens"]},
        "adapters of embeddings are not served",
    ),
    "tokens": (
        {"target_modules": ALL, "trainable_token_indices": [1, 5]},
        r"trainable_token_indices is .*: trained token embeddings are not served",
    ),
    "biases": ({"target_modules": ["q_proj"], "lora_bias": True}, "lora_bias is True: biases"),
    "PiSSA": (
        {"target_modules": ALL, "init_lora_weights": "pissa"},
        "init_lora_weights is 'pissa'",
    ),
}


def adapted(model: Any, config: Mapping[str, Any], directory: Path, task: str = "CAUSAL_LM") -> Any:
    """A model with an adapter of random numbers, which is saved to a directory."""
    torch.manual_seed(len(config))
    wrapped = peft.get_peft_model(model, peft.LoraConfig(task_type=task, **config))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if ".modules_to_save." in name:
                parameter.add_(0.5 * torch.randn_like(parameter))
            if ".lora_" in name:
                scale = 0.5 / parameter.shape[-1] ** 0.5
                parameter.copy_(torch.randn_like(parameter) * scale)
    wrapped.save_pretrained(directory)
    return wrapped.eval()


@torch.inference_mode()
def greedy_of(model: Any, prompt: list[int], count: int) -> tuple[list[int], float]:
    """Greedy tokens by PEFT's own forward, without a cache, and the first one's logprob."""
    ids, first = list(prompt), None
    for _ in range(count):
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].float()
        ids.append(int(logits.argmax()))
        first = float(torch.log_softmax(logits, -1).max()) if first is None else first
    assert first is not None
    return ids[len(prompt) :], first


@pytest.fixture(scope="module")
def driver(tiny: Tiny) -> EngineDriver:
    return EngineDriver(tiny("llama").directory, lora=LORA)


def check(driver: EngineDriver, model: Any, directory: Path) -> None:
    """The engine's tokens and logprob with the saved adapter are those of PEFT's model."""
    prompt = prompt_of(20, seed=3)
    read = driver.model.adapters.read(directory)
    expected, logprob = greedy_of(model, prompt, NUM_TOKENS)
    fields = {name: getattr(greedy(1), name) for name in greedy(1).__struct_fields__}
    sampling = type(greedy(1))(**{**fields, "max_tokens": NUM_TOKENS, "logprobs": 1})
    (found, plain) = driver.again().run(
        [Job(prompt, sampling, adapter=read), Job(prompt, greedy(NUM_TOKENS))]
    )
    assert found.token_ids == expected
    assert found.logprobs[0].logprob == pytest.approx(logprob, abs=2e-4)
    assert plain.token_ids != expected, "the adapter changes nothing"


@pytest.mark.parametrize("name", SERVED)
def test_the_engine_equals_the_model_of_peft(
    driver: EngineDriver, tmp_path: Path, name: str
) -> None:
    model = adapted(make_model("llama"), SERVED[name], tmp_path)
    check(driver, model, tmp_path)


def test_experts_as_target_parameters_equal_the_model_of_peft(tiny: Tiny, tmp_path: Path) -> None:
    driver = EngineDriver(tiny("qwen3_moe").directory, lora=LORA)
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = {"target_modules": ["q_proj", "o_proj"], "r": 4, "target_parameters": parameters}
    model = adapted(make_general("qwen3_moe"), config, tmp_path)
    check(driver, model, tmp_path)


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
def test_patterns_that_peft_writes_for_merged_experts_are_read(
    tiny: Tiny, tmp_path: Path, name: str
) -> None:
    """It turns gate_proj and up_proj into one parameter of twice the rank."""
    driver = EngineDriver(tiny(name).directory, lora=LORA)
    model = adapted(
        make_general(name), {"target_modules": ALL, "r": 4, "use_rslora": True}, tmp_path
    )
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["rank_pattern"] == {r".*\.gate_up_proj": 8}
    check(driver, model, tmp_path)


def test_modules_that_the_config_does_not_choose_are_left_out_as_by_peft(
    driver: EngineDriver, tmp_path: Path
) -> None:
    adapted(make_model("llama"), {"target_modules": ALL, "r": 4}, tmp_path)
    file = tmp_path / "adapter_config.json"
    config = json.loads(file.read_text())
    changes = {
        "target_modules": r".*(q|up)_proj",
        "exclude_modules": ["model.layers.1.mlp.up_proj"],
    }
    file.write_text(json.dumps(config | changes))
    model = peft.PeftModel.from_pretrained(make_model("llama"), tmp_path).eval()
    check(driver, model, tmp_path)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_refused_by_name(
    driver: EngineDriver, tmp_path: Path, name: str
) -> None:
    config, words = REFUSED[name]
    adapted(make_model("llama"), config, tmp_path)
    with pytest.raises(InvalidInput, match=words):
        driver.model.adapters.read(tmp_path)


POOLED: Final[Mapping[str, tuple[str, str, dict[str, Any]]]] = {
    "a classifier": (
        "bert",
        "SEQ_CLS",
        {"target_modules": ["query", "dense"], "r": 4, "lora_alpha": 8},
    ),
    "a classifier of two layers": ("roberta", "SEQ_CLS", {"target_modules": "all-linear"}),
    "a classifier with another before it": ("distilbert", "SEQ_CLS", {"target_modules": ["q_lin"]}),
    "a decoder that classifies": ("llama", "SEQ_CLS", {"target_modules": ALL, "use_rslora": True}),
    "tokens": ("xlm_roberta", "TOKEN_CLS", {"target_modules": ["value", "dense"], "r": 3}),
    "an encoder": ("modernbert", "FEATURE_EXTRACTION", {"target_modules": "all-linear"}),
    "an encoder with a pooler": ("bert", "FEATURE_EXTRACTION", {"target_modules": "all-linear"}),
    "a decoder": (
        "qwen3",
        "FEATURE_EXTRACTION",
        {"target_modules": ALL, "rank_pattern": {"layers.1.mlp.up_proj": 5}},
    ),
}
_CLASSES: Final = {
    "SEQ_CLS": "ForSequenceClassification",
    "TOKEN_CLS": "ForTokenClassification",
    "FEATURE_EXTRACTION": "Model",
}


@pytest.mark.parametrize("name", POOLED)
def test_models_that_pool_equal_the_model_of_peft(tmp_path: Path, name: str) -> None:
    family, task, config = POOLED[name]
    fake = {**ENCODERS, **DECODERS}[family]
    model = make_pooler(fake, _CLASSES[task])
    model.save_pretrained(tmp_path / "model")
    if task == "FEATURE_EXTRACTION":
        write_modules(tmp_path / "model")
    settings = {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 64, "lora": LORA}
    pooling = {"runner": "pooling"}
    driver = PoolDriver(tmp_path / "model", model=pooling, **settings)
    wrapped = adapted(model, config, tmp_path / "adapter", task)
    read = driver.loaded.adapters.read(tmp_path / "adapter")
    kinds = {"SEQ_CLS": "classify", "TOKEN_CLS": "token_classify"}
    params = PoolingParams(task=kinds.get(task, "token_embed"), use_activation=False)  # type: ignore[arg-type]
    given = prompts(7, 20, 33, 7)
    for prompt, ours in zip(given, driver.run_adapted(given, [read] * 4, params), strict=True):
        with torch.inference_mode():
            out = wrapped(input_ids=torch.tensor([prompt]))
        expected = out.last_hidden_state if task == "FEATURE_EXTRACTION" else out.logits
        assert ours == pytest.approx(expected[0].numpy(), abs=2e-4)

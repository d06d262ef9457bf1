"""Classifiers, scores and modules answer as transformers and sentence-transformers define them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fakes.pool_driver import PoolDriver
from tests.fakes.poolers import (
    DECODERS,
    ENCODERS,
    HIDDEN,
    make_pooler,
    prompts,
    states_of,
    write_json,
    write_modules,
)
from tokenmesh.shared.errors import CheckpointError, ConfigError, InvalidInput
from tokenmesh.shared.messages.pooling import PoolingParams

LENGTHS = (7, 1, 33, 7, 20, 2)
NN = "torch.nn.modules"
EMBED = PoolingParams(task="embed")
CLASSIFY = PoolingParams(task="classify")
TOKENS = PoolingParams(task="token_classify")
RAW = PoolingParams(task="classify", use_activation=False)


@torch.no_grad()
def logits_of(model: Any, prompt: list[int]) -> torch.Tensor:
    return model(input_ids=torch.tensor([prompt])).logits[0]  # type: ignore[no-any-return]


def driver_of(model: Any, directory: Path, **settings: Any) -> PoolDriver:
    model.save_pretrained(directory)
    return PoolDriver(directory, max_num_batched_tokens=64, **settings)


@pytest.mark.parametrize(
    "name", ["bert", "roberta", "distilbert", "modernbert", "deberta_v2", "mpnet", "gte"]
)
def test_sequences_are_classified(name: str, tmp_path: Path) -> None:
    model = make_pooler(ENCODERS[name], "ForSequenceClassification", num_labels=3)
    driver = driver_of(model, tmp_path)
    given = prompts(*LENGTHS)
    for prompt, raw, scores in zip(
        given, driver.run(given, RAW), driver.run(given, CLASSIFY), strict=True
    ):
        expected = logits_of(model, prompt)
        np.testing.assert_allclose(raw, expected.numpy(), atol=3e-5)
        np.testing.assert_allclose(scores, expected.softmax(-1).numpy(), atol=3e-5)


def test_modernbert_may_classify_a_mean(tmp_path: Path) -> None:
    fake = ENCODERS["modernbert"]
    model = make_pooler(fake, "ForSequenceClassification", classifier_pooling="mean")
    driver = driver_of(model, tmp_path)
    given = prompts(*LENGTHS)
    for prompt, raw in zip(given, driver.run(given, RAW), strict=True):
        np.testing.assert_allclose(raw, logits_of(model, prompt).numpy(), atol=3e-5)


@pytest.mark.parametrize("name", ["bert", "xlm_roberta", "modernbert"])
def test_tokens_are_classified(name: str, tmp_path: Path) -> None:
    model = make_pooler(ENCODERS[name], "ForTokenClassification", num_labels=4)
    driver = driver_of(model, tmp_path)
    assert driver.loaded.pooling.tasks == ("token_classify",)
    given = prompts(*LENGTHS)
    for prompt, scores in zip(given, driver.run(given, TOKENS), strict=True):
        expected = logits_of(model, prompt).softmax(-1).numpy()
        np.testing.assert_allclose(scores, expected, atol=3e-5)


@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert"])
def test_a_classifier_of_sequences_is_put_to_each_token(name: str, tmp_path: Path) -> None:
    """Its last part, as vLLM does it: without the pooler before it."""
    model = make_pooler(ENCODERS[name], "ForSequenceClassification", num_labels=3)
    driver = driver_of(model, tmp_path)
    assert driver.loaded.pooling.tasks == ("classify", "token_classify")
    given = prompts(*LENGTHS)
    raw = PoolingParams(task="token_classify", use_activation=False)
    for prompt, scores, logits in zip(
        given, driver.run(given, TOKENS), driver.run(given, raw), strict=True
    ):
        with torch.no_grad():
            states = states_of(model.base_model, prompt)[:, None]
            expected = model.classifier(states).reshape(len(prompt), 3)
        np.testing.assert_allclose(logits, expected.numpy(), atol=3e-5)
        np.testing.assert_allclose(scores, expected.softmax(-1).numpy(), atol=3e-5)


def test_a_classifier_of_sequences_may_be_served_for_tokens_only(tmp_path: Path) -> None:
    model = make_pooler(ENCODERS["bert"], "ForSequenceClassification", num_labels=3)
    model.save_pretrained(tmp_path)
    driver = PoolDriver(tmp_path, model={"pooling_task": "token_classify"})
    assert driver.loaded.pooling.tasks == ("token_classify",)
    (scores,) = driver.run(prompts(3), TOKENS)
    assert scores.shape == (3, 3)


def test_a_classifier_whose_last_part_takes_no_single_state_has_no_scores_of_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenmesh.engine.models.tree.pooling.each_token._LAST_PARTS", ())
    model = make_pooler(ENCODERS["bert"], "ForSequenceClassification", num_labels=3)
    assert driver_of(model, tmp_path).loaded.pooling.tasks == ("classify",)
    with pytest.raises(ConfigError, match="cannot be put to each token"):
        PoolDriver(tmp_path, model={"pooling_task": "token_classify"})


def test_a_cross_encoder_scores_pairs(tmp_path: Path) -> None:
    model = make_pooler(ENCODERS["bert"], "ForSequenceClassification", num_labels=1)
    driver = driver_of(model, tmp_path)
    assert driver.loaded.pooling.tasks == ("classify", "score", "token_classify")
    (prompt,) = prompts(12)
    types = [0] * 7 + [1] * 5
    (score,) = driver.run([prompt], PoolingParams(task="score"), [bytes(types)])
    with torch.no_grad():
        ids, kinds = torch.tensor([prompt]), torch.tensor([types])
        expected = model(input_ids=ids, token_type_ids=kinds).logits[0].sigmoid()
    np.testing.assert_allclose(score, expected.numpy(), atol=3e-5)


@pytest.mark.parametrize(
    ("values", "activation"),
    [
        ({"problem_type": "multi_label_classification"}, torch.sigmoid),
        ({"problem_type": "regression"}, lambda x: x),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            lambda x: x,
        ),
        (
            {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"},
            torch.sigmoid,
        ),
    ],
)
def test_the_checkpoint_says_what_makes_scores(
    values: dict[str, Any], activation: Any, tmp_path: Path
) -> None:
    model = make_pooler(ENCODERS["bert"], "ForSequenceClassification", num_labels=2, **values)
    driver = driver_of(model, tmp_path)
    (prompt,) = prompts(12)
    expected = activation(logits_of(model, prompt)).numpy()
    np.testing.assert_allclose(driver.run([prompt], CLASSIFY)[0], expected, atol=3e-5)


def test_an_unknown_activation_is_refused(tmp_path: Path) -> None:
    values = {"sentence_transformers": {"activation_fn": "os.system"}}
    model = make_pooler(ENCODERS["bert"], "ForSequenceClassification", num_labels=1, **values)
    with pytest.raises(CheckpointError, match=r"os\.system"):
        driver_of(model, tmp_path)


def test_labels_have_names(tmp_path: Path) -> None:
    names = {0: "ham", 1: "spam"}
    model = make_pooler(ENCODERS["bert"], "ForSequenceClassification", id2label=names)
    assert driver_of(model, tmp_path).loaded.pooling.labels == ("ham", "spam")


def test_modules_follow_each_other(tmp_path: Path) -> None:
    model = make_pooler(ENCODERS["bert"], "Model")
    model.save_pretrained(tmp_path)
    dense = torch.nn.Linear(HIDDEN, 24)
    write_modules(tmp_path, "pooling_mode_cls_token", dense=dense)
    driver = PoolDriver(tmp_path)
    assert driver.loaded.pooling.size == 24
    given = prompts(*LENGTHS)
    for prompt, numbers in zip(given, driver.run(given), strict=True):
        with torch.no_grad():
            made = torch.tanh(dense(states_of(model, prompt)[0]))
        expected = torch.nn.functional.normalize(made, dim=-1).numpy()
        np.testing.assert_allclose(numbers, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("take", "formula"),
    [
        ("pooling_mode_cls_token", lambda x: x[0]),
        ("pooling_mode_max_tokens", lambda x: x.max(dim=0).values),
        ("pooling_mode_mean_tokens", lambda x: x.mean(dim=0)),
        ("pooling_mode_mean_sqrt_len_tokens", lambda x: x.sum(dim=0) / len(x) ** 0.5),
        ("pooling_mode_lasttoken", lambda x: x[-1]),
        (
            "pooling_mode_weightedmean_tokens",
            lambda x: (x * torch.arange(1, len(x) + 1)[:, None]).sum(0) / sum(range(1, len(x) + 1)),
        ),
    ],
)
def test_ways_to_take(take: str, formula: Any, tmp_path: Path) -> None:
    """Compare an encoder in one step, and a decoder in chunks."""
    given = prompts(*LENGTHS)
    for name, fake in {"bert": ENCODERS["bert"], "llama": DECODERS["llama"]}.items():
        model = make_pooler(fake, "Model")
        directory = tmp_path / name
        model.save_pretrained(directory)
        write_modules(directory, take, normalizes=False)
        driver = PoolDriver(directory, max_num_batched_tokens=10, long_prefill_token_threshold=5)
        for prompt, numbers in zip(given, driver.run(given), strict=True):
            expected = formula(states_of(model, prompt)).numpy()
            np.testing.assert_allclose(numbers, expected, atol=5e-5)


def test_dimensions_are_cut_before_the_length(tmp_path: Path) -> None:
    model = make_pooler(ENCODERS["bert"], "Model", matryoshka_dimensions=[8, 16])
    model.save_pretrained(tmp_path)
    write_modules(tmp_path)
    driver = PoolDriver(tmp_path)
    (prompt,) = prompts(9)
    whole = driver.run([prompt])[0]
    cut = driver.run([prompt], PoolingParams(task="embed", dimensions=8))[0]
    np.testing.assert_allclose(cut, whole[:8] / np.linalg.norm(whole[:8]), atol=1e-6)
    facts = driver.loaded.pooling
    facts.check(PoolingParams(task="embed", dimensions=16))
    with pytest.raises(InvalidInput, match="8, 16"):
        facts.check(PoolingParams(task="embed", dimensions=12))


def test_activation_may_be_left_out(tmp_path: Path) -> None:
    model = make_pooler(ENCODERS["bert"], "Model")
    model.save_pretrained(tmp_path)
    write_modules(tmp_path)
    driver = PoolDriver(tmp_path)
    (prompt,) = prompts(9)
    plain = driver.run([prompt], PoolingParams(task="embed", use_activation=False))[0]
    np.testing.assert_allclose(plain, states_of(model, prompt).mean(dim=0).numpy(), atol=2e-5)


@pytest.mark.parametrize("stated", [{"dim": HIDDEN}, {"colbert_dim": 24}, {}])
def test_colbert_embeds_tokens(tmp_path: Path, stated: dict[str, int]) -> None:
    model = make_pooler(ENCODERS["bert"], "ForMaskedLM")
    model.save_pretrained(tmp_path)
    weight = torch.randn(24, HIDDEN)
    body = {f"bert.{k}": v.clone() for k, v in model.base_model.state_dict().items()}
    save_file({**body, "linear.weight": weight}, tmp_path / "model.safetensors")
    config = {**model.config.to_dict(), "architectures": ["HF_ColBERT"], **stated}
    write_json(tmp_path / "config.json", config)
    driver = PoolDriver(tmp_path)
    assert driver.loaded.pooling.tasks == ("token_embed",)
    given = prompts(*LENGTHS)
    for prompt, numbers in zip(
        given, driver.run(given, PoolingParams(task="token_embed")), strict=True
    ):
        made = states_of(model, prompt) @ weight.T
        expected = torch.nn.functional.normalize(made, dim=-1).numpy()
        np.testing.assert_allclose(numbers, expected, atol=2e-5)


def test_a_modernbert_of_pylate_embeds_tokens(tmp_path: Path) -> None:
    model = make_pooler(ENCODERS["modernbert"], "Model")
    model.save_pretrained(tmp_path)
    entries = [
        ("", "sentence_transformers.models.Transformer"),
        ("1_Dense", "pylate.models.Dense.Dense"),
    ]
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": kind}
        for number, (path, kind) in enumerate(entries)
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Dense").mkdir()
    stated: dict[str, object] = {
        "in_features": HIDDEN,
        "out_features": 24,
        "bias": False,
        "use_residual": False,
    }
    stated["activation_function"] = "torch.nn.modules.linear.Identity"
    write_json(tmp_path / "1_Dense" / "config.json", stated)
    weight = torch.randn(24, HIDDEN)
    save_file({"linear.weight": weight}, tmp_path / "1_Dense" / "model.safetensors")
    driver = PoolDriver(tmp_path)
    assert driver.loaded.pooling.tasks == ("token_embed",)
    given = prompts(*LENGTHS)
    found = driver.run(given, PoolingParams(task="token_embed"))
    for prompt, numbers in zip(given, found, strict=True):
        expected = torch.nn.functional.normalize(states_of(model, prompt) @ weight.T, dim=-1)
        np.testing.assert_allclose(numbers, expected.numpy(), atol=2e-5)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"architectures": ["HF_ColBERT"], "auto_map": {"AutoModel": "xlm_roberta.Flash"}},
            "xlm_roberta.Flash.*HF_ColBERT",
        ),
        ({"architectures": ["ColQwen3"]}, "ColQwen3 cannot be served"),
        ({"architectures": ["ColBERTJinaRobertaModel"]}, "ColBERTJinaRobertaModel cannot be"),
    ],
)
def test_late_interaction_by_code_that_is_not_known_is_refused_by_name(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = make_pooler(ENCODERS["xlm_roberta"], "Model")
    model.save_pretrained(tmp_path)
    write_json(tmp_path / "config.json", {**model.config.to_dict(), **config})
    with pytest.raises(CheckpointError, match=message):
        PoolDriver(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"type": "sentence_transformers.models.LSTM"}, "LSTM"),
        ({"type": "sentence_transformers.models.WeightedLayerPooling"}, "WeightedLayerPooling"),
        ({"path": "../elsewhere"}, "not a directory in it"),
    ],
)
def test_unknown_modules_are_refused_by_name(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = make_pooler(ENCODERS["bert"], "Model")
    model.save_pretrained(tmp_path)
    write_modules(tmp_path)
    entry = {"idx": 3, "name": "3", "path": "3_X", "type": "x.Dense", **change}
    kind = "sentence_transformers.models."
    entries = [
        {"idx": 0, "name": "0", "path": "", "type": f"{kind}Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{kind}Pooling"},
        entry,
    ]
    write_json(tmp_path / "modules.json", entries)
    with pytest.raises(CheckpointError, match=message):
        PoolDriver(tmp_path)


def test_a_module_without_its_weights_is_refused(tmp_path: Path) -> None:
    model = make_pooler(ENCODERS["bert"], "Model")
    model.save_pretrained(tmp_path)
    write_modules(tmp_path, dense=torch.nn.Linear(HIDDEN, 24))
    (tmp_path / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        PoolDriver(tmp_path)


def test_a_missing_tensor_is_refused(tmp_path: Path) -> None:
    model = make_pooler(ENCODERS["bert"], "ForSequenceClassification")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["bert.pooler.dense.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="pooler"):
        PoolDriver(tmp_path)


def test_an_encoder_has_no_classifier_to_convert_to(tmp_path: Path) -> None:
    make_pooler(ENCODERS["bert"], "Model").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no classifier"):
        PoolDriver(tmp_path, model={"convert": "classify"})

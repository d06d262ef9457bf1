"""A tower gives what transformers' get_image_features gives."""

import json
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlavaForConditionalGeneration

from tests.fakes.llava import IMAGE_SIZE, NUM_PATCHES, config, llava
from tokenmesh.services.mm_encoder_svc.batcher import Features
from tokenmesh.services.mm_encoder_svc.checkpoint import find_tower
from tokenmesh.services.mm_encoder_svc.tower import Tower, load_tower
from tokenmesh.shared.config.model import Dtype, EncoderSettings
from tokenmesh.shared.errors import CheckpointError, ConfigError, ProtocolError
from tokenmesh.shared.tensor_blob import TensorBlob

ATOL = 2e-4
LIMITS = EncoderSettings(device="cpu")
SHAPE = (3, IMAGE_SIZE, IMAGE_SIZE)


def images(count: int) -> torch.Tensor:
    return torch.randn((count, *SHAPE), generator=torch.Generator().manual_seed(1))


def blob(pixels: torch.Tensor, num_embeddings: int = NUM_PATCHES) -> Features:
    tensor = TensorBlob("float32", (1, *pixels.shape), pixels.numpy().tobytes())
    return Features("image", {"pixel_values": tensor}, num_embeddings)


def array(embeddings: TensorBlob) -> numpy.ndarray:
    return numpy.frombuffer(embeddings.data, dtype="<f4").reshape(embeddings.shape)


def load(directory: Path, dtype: Dtype = "auto") -> Tower:
    found = find_tower(str(directory), None)
    assert found is not None
    return load_tower(found, dtype, LIMITS)


def rewrite(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"vision_feature_layer": 2, "vision_feature_select_strategy": "full"},
        {"vision_feature_layer": [-3, 1, -1]},
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (
                {"vision_feature_select_strategy": "full"},
                {"vision_feature_layer": -1},
                {"vision_feature_layer": [0, 3]},
                {"vision_feature_layer": [-2], "vision_feature_select_strategy": "full"},
                {"multimodal_projector_bias": False, "projector_hidden_act": "silu"},
                {"vision_config": {**config()["vision_config"], "hidden_act": "gelu"}},  # type: ignore[dict-item]
                {"vision_config": {**config()["vision_config"], "patch_size": 7}},  # type: ignore[dict-item]
            )
        ),
    ],
    ids=str,
)
def test_embeddings_equal_those_of_transformers(
    overrides: dict[str, object], tmp_path: Path
) -> None:
    directory = llava(tmp_path, **overrides)
    oracle = LlavaForConditionalGeneration.from_pretrained(directory, dtype=torch.float32)
    tower = load(directory)
    pixels = images(3)
    with torch.inference_mode():
        expected = oracle.get_image_features(
            pixel_values=pixels,
            vision_feature_layer=oracle.config.vision_feature_layer,
            vision_feature_select_strategy=oracle.config.vision_feature_select_strategy,
        ).pooler_output
    ours = tower.encode([blob(one, len(expected[0])) for one in pixels])
    assert len(ours) == len(expected) == 3
    for mine, theirs in zip(ours, expected, strict=True):
        assert mine.shape == theirs.shape
        numpy.testing.assert_allclose(array(mine), theirs.numpy(), atol=ATOL, rtol=0)


def test_an_image_has_the_same_embeddings_alone_and_in_a_batch(tmp_path: Path) -> None:
    tower = load(llava(tmp_path))
    blobs = [blob(one) for one in images(4)]
    together = tower.encode(blobs)
    for one, among_others in zip(blobs, together, strict=True):
        (alone,) = tower.encode([one])
        numpy.testing.assert_allclose(array(alone), array(among_others), atol=1e-5, rtol=0)


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    directory = llava(tmp_path)
    exact = load(directory)
    tower = load(directory, "bfloat16")
    (rounded,) = tower.encode([blob(images(1)[0])])
    (expected,) = exact.encode([blob(images(1)[0])])
    assert rounded.dtype == "bfloat16"
    values = torch.frombuffer(bytearray(rounded.data), dtype=torch.bfloat16).float()
    error = (values.view(expected.shape).numpy() - array(expected)).std()
    assert error < 0.03 * array(expected).std()


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("infix", ["", "vision_model."])
def test_every_spelling_of_tensor_names_loads(prefix: str, infix: str, tmp_path: Path) -> None:
    directory = llava(tmp_path)
    before = load(directory).encode([blob(images(1)[0])])
    tensors = load_file(directory / "model.safetensors")
    renamed = {
        prefix + name.replace("vision_tower.", f"vision_tower.{infix}"): tensor
        for name, tensor in tensors.items()
    }
    renamed[f"{prefix}vision_tower.{infix}embeddings.position_ids"] = torch.arange(26)
    rewrite(directory, renamed)
    after = load(directory).encode([blob(images(1)[0])])
    assert after == before


def test_shards_are_found_by_the_index(tmp_path: Path) -> None:
    directory = llava(tmp_path)
    before = load(directory)
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[::2], names[1::2])):
        file = f"model-{number}.safetensors"
        save_file({name: tensors[name] for name in part}, directory / file)
        weight_map |= dict.fromkeys(part, file)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert load(directory).fingerprint == before.fingerprint


def test_the_fingerprint_follows_the_weights_of_the_tower_only(tmp_path: Path) -> None:
    directory = llava(tmp_path)
    before = load(directory).fingerprint
    tensors = load_file(directory / "model.safetensors")
    tensors["language_model.lm_head.weight"] += 1
    rewrite(directory, tensors)
    assert load(directory).fingerprint == before
    tensors["multi_modal_projector.linear_2.bias"][0] += 1
    rewrite(directory, tensors)
    assert load(directory).fingerprint != before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", "lacks the tower's tensors model.multi_modal_projector.linear_1.weight"),
        ("unknown", "unknown tensors model.vision_tower.extra.weight"),
        ("shape", r"multi_modal_projector.linear_1.weight has shape \(1, 2\), not \(32, 24\)"),
        ("truncated", "model.safetensors: cannot be read as safetensors: it holds"),
        ("gone", "holds no weights"),
    ],
)
def test_a_checkpoint_that_does_not_fit_names_the_tensor_or_file(
    change: str, message: str, tmp_path: Path
) -> None:
    directory = llava(tmp_path)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    name = "multi_modal_projector.linear_1.weight"
    if change == "missing":
        del tensors[name]
    elif change == "unknown":
        tensors["vision_tower.extra.weight"] = torch.ones(1)
    elif change == "shape":
        tensors[name] = torch.ones(1, 2)
    rewrite(directory, tensors)
    if change == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    elif change == "gone":
        path.unlink()
    with pytest.raises(CheckpointError, match=message):
        load(directory)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"vision_config": 3}, None),
        ({"architectures": ["NoSuchModel"]}, "transformers has no class NoSuchModel"),
        ({"projector_hidden_act": "swoosh"}, "its tower cannot be loaded: KeyError"),
    ],
)
def test_a_config_that_makes_no_sense_says_so(
    overrides: dict[str, object], message: str | None, tmp_path: Path
) -> None:
    directory = llava(tmp_path)
    (directory / "config.json").write_text(json.dumps({**config(), **overrides}))
    if message is None:
        assert find_tower(str(directory), None) is None
        return
    with pytest.raises(CheckpointError, match=message):
        load(directory)


def test_features_that_the_tower_does_not_take_are_refused(tmp_path: Path) -> None:
    tower = load(llava(tmp_path))
    assert tower.kinds == {"image"}
    good = blob(images(1)[0])
    tower.check(good)
    for bad, message in (
        (Features("audio", good.tensors, 25), "no tower for audio"),
        (Features("image", {"input_ids": good.tensors["pixel_values"]}, 25), "not take input_ids"),
        (Features("image", {"pixel_values": TensorBlob("bool", (), b"1")}, 25), "no batch"),
    ):
        with pytest.raises(ProtocolError, match=message):
            tower.check(bad)
    with pytest.raises(ProtocolError, match="cannot encode this image"):
        tower.encode([blob(images(1)[0][:, :5])])
    with pytest.raises(ProtocolError, match="makes 25 embeddings, the prompts have places for 3"):
        tower.encode([blob(images(1)[0], 3)])


def test_a_missing_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = find_tower(str(llava(tmp_path)), None)
    assert found is not None
    with pytest.raises(ConfigError, match="finds no GPU") as caught:
        load_tower(found, "auto", EncoderSettings(device="cuda"))
    assert caught.value.param == "encoder.device"

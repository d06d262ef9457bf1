"""KV caches of 8 bits against transformers with a cache that rounds the same keys and values."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache

from tests.engine.test_general_kind import chunked_logits
from tests.fakes.engine_driver import EngineDriver, Job, greedy, load
from tests.fakes.tiny import Tiny, prompt_of
from tokenmesh.engine.exec.page_dtype import page_dtype_of
from tokenmesh.engine.models.keeps import Latent, LayerKeeps
from tokenmesh.engine.models.kv_scales import read_kv_scales
from tokenmesh.engine.models.kv_store import KvScale
from tokenmesh.engine.models.raw_config import RawConfig
from tokenmesh.kernels.page_codes import FP8, decode, encode
from tokenmesh.shared.config.worker import KvCacheDtype, WorkerSettings
from tokenmesh.shared.errors import CheckpointError, ConfigError

TYPES: Final = {
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
PROMPTS: Final = [prompt_of(50), prompt_of(29, seed=1)]
LAYERS: Final = 3
FIRST: Final = 4
"""Tokens that see so few keys that none of them gets another code."""


class RoundingCache(DynamicCache):  # type: ignore[misc]
    """transformers' cache, of what our pages hold."""

    def __init__(self, dtype: torch.dtype, is_latent: bool, scales: Sequence[KvScale] = ()) -> None:
        super().__init__()
        self._dtype, self._is_latent, self._scales = dtype, is_latent, scales

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *args: Any, **named: Any
    ) -> Any:
        scale = self._scales[layer] if self._scales else KvScale()
        if self._is_latent:
            both = self._rounded(torch.cat([key, value], dim=-1), scale.key)
            key, value = torch.split(both, [key.shape[-1], value.shape[-1]], dim=-1)
        else:
            key, value = self._rounded(key, scale.key), self._rounded(value, scale.value)
        return super().update(key, value, layer, *args, **named)

    def _rounded(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        rows = encode(x, self._dtype, scale)
        return decode(rows, torch.float32) * (scale if self._dtype in FP8 else 1)


def expected(
    directory: Path,
    keeps: Sequence[LayerKeeps],
    dtype: torch.dtype,
    scales: Sequence[KvScale] = (),
) -> list[torch.Tensor]:
    """transformers' logits of the prompts."""
    oracle: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    is_latent = isinstance(keeps[0][0], Latent)
    with torch.no_grad():
        return [
            oracle(
                torch.tensor([prompt]), past_key_values=RoundingCache(dtype, is_latent, scales)
            ).logits[0]
            for prompt in PROMPTS
        ]


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """On average. Two numbers that are equal but for the last bit may get codes next to each other,
    which moves all logits after them a little."""
    return float((ours - theirs).abs().mean())


def check(driver: EngineDriver, wanted: list[torch.Tensor], chunks: Sequence[int]) -> None:
    """Logits are those of the rounded cache, and far from those of the model's own."""
    model = driver.model.resident._model
    store = driver.model.resident._store
    assert model is not None
    found = [chunked_logits(model, store, PROMPTS, chunk) for chunk in chunks]
    for logits in found:
        for ours, theirs in zip(logits, wanted, strict=True):
            assert distance(ours, theirs) < 6e-3
            torch.testing.assert_close(ours[:FIRST], theirs[:FIRST], atol=2e-4, rtol=0)
        if model.has_program:
            # the C kernels compute each token alone
            assert all(map(torch.equal, logits, found[0]))


@pytest.mark.parametrize(
    ("name", "kind", "settings"),
    [
        ("llama", "int8", {}),
        ("llama", "fp8", {}),
        ("llama", "fp8_e5m2", {}),
        ("llama", "int8", {"native_kernels": False}),
        ("qwen3", "fp8", {"model_impl": "transformers"}),
        ("qwen2_window", "int8", {}),
        ("gemma2", "int8", {}),
        ("gpt_oss", "fp8", {}),
        ("deepseek_v3", "int8", {}),
        ("deepseek_v3", "fp8", {}),
    ],
)
def test_logits_are_those_of_rounded_keys_and_values(
    tiny: Tiny, name: str, kind: str, settings: dict[str, Any]
) -> None:
    directory = tiny(name).directory
    driver = EngineDriver(directory, kv_cache_dtype=kind, **settings)
    wanted = expected(directory, driver.model.resident._store.keeps, TYPES[kind])
    check(driver, wanted, (1, 7, 16, 1024))
    plain = tiny(name).logits(PROMPTS[0])
    assert distance(plain, wanted[0]) > 3e-3


def with_scales(source: Path, target: Path, tensors: dict[str, float | list[float]]) -> Path:
    shutil.copytree(source, target)
    stored = load_file(target / "model.safetensors")
    stored |= {name: torch.tensor(value) for name, value in tensors.items()}
    save_file(stored, target / "model.safetensors", {"format": "pt"})
    return target


LAYER: Final = "model.layers.{}.self_attn."
NAMES: Final = {
    "k_scale": ("k_scale", "v_scale"),
    "attn.k_scale": ("attn.k_scale", "attn.v_scale"),
    "k_proj.k_scale": ("k_proj.k_scale", "v_proj.v_scale"),
    "qkv_proj.k_scale": ("qkv_proj.k_scale", "qkv_proj.v_scale"),
    "output_scale": ("k_proj.output_scale", "v_proj.output_scale"),
}


@pytest.mark.parametrize("style", NAMES)
def test_scales_are_found_under_the_names_that_exporters_use(
    tiny: Tiny, tmp_path: Path, style: str
) -> None:
    tensors: dict[str, float | list[float]] = {
        LAYER.format(layer) + name: [0.5 + layer + which]
        for layer in range(LAYERS)
        for which, name in enumerate(NAMES[style])
    }
    scales = read_kv_scales(with_scales(tiny("llama").directory, tmp_path / "a", tensors))
    assert scales.of(4) == (*(KvScale(0.5 + n, 1.5 + n) for n in range(LAYERS)), KvScale())
    assert scales.names == set(tensors)


def test_scales_of_a_checkpoint_are_applied(tiny: Tiny, tmp_path: Path) -> None:
    source = tiny("llama").directory
    tensors: dict[str, float | list[float]] = {
        "model.layers.0.self_attn.kv_scale": 0.03,
        "model.layers.1.self_attn.k_scale": 0.07,
        "model.layers.1.self_attn.v_scale": 0.002,
    }
    directory = with_scales(source, tmp_path / "a", tensors)
    scales = [KvScale(0.03, 0.03), KvScale(0.07, 0.002), KvScale()]
    for settings in ({}, {"native_kernels": False}, {"model_impl": "transformers"}):
        driver = EngineDriver(directory, kv_cache_dtype="fp8", **settings)
        wanted = expected(source, driver.model.resident._store.keeps, torch.float8_e4m3fn, scales)
        check(driver, wanted, (7, 1024))
    # 448 times 0.002 cuts values off
    assert distance(tiny("llama").logits(PROMPTS[0]), wanted[0]) > 0.05


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({"k_scale": 0.0}, "k_scale is 0, which is not a scale"),
        ({"v_scale": torch.nan}, "v_scale is nan, which is not a scale"),
        ({"k_scale": [1.0, 2.0]}, r"k_scale has shape \[2\]; a layer has one scale"),
        ({"k_scale": 1.0, "attn.k_scale": 1.0}, "is a second scale of layer 0"),
        ({"k_zero_point": 3.0}, "k_zero_point is 3; only keys and values around 0 are read"),
    ],
)
def test_scales_that_are_none_are_refused(
    tiny: Tiny, tmp_path: Path, tensors: dict[str, Any], problem: str
) -> None:
    named = {LAYER.format(0) + name: value for name, value in tensors.items()}
    directory = with_scales(tiny("llama").directory, tmp_path / "a", named)
    with pytest.raises(CheckpointError, match=problem):
        load(directory, kv_cache_dtype="fp8")


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_streams_are_the_same_alone_batched_preempted_moved_and_after_prefix_hits(
    tiny: Tiny, kind: str
) -> None:
    shared = prompt_of(37, seed=5)
    prompts = [shared, [*shared[:32], 7], prompt_of(20, seed=2), prompt_of(40, seed=3)]
    jobs = [Job(prompt, greedy(24)) for prompt in prompts]
    driver = EngineDriver(tiny("llama").directory, kv_cache_dtype=kind, batch_invariant=True)
    alone = [driver.again().tokens([job])[0] for job in jobs]
    assert driver.again().tokens(jobs, steps_between=2) == alone
    again = driver.again()
    assert again.tokens(jobs) == alone
    hits = again.run(jobs)
    assert [each.token_ids for each in hits] == alone
    assert min(each.num_cached for each in hits) >= 16
    few = driver.again(num_blocks=12).run(jobs)
    assert [each.token_ids for each in few] == alone
    assert sum(each.num_preemptions for each in few) > 0
    moved = [
        Job(job.prompt, greedy(24), tokens[:9]) for job, tokens in zip(jobs, alone, strict=True)
    ]
    assert driver.again(max_num_batched_tokens=16).tokens(moved) == alone


def test_half_precision_is_near_the_rounded_cache(tiny: Tiny) -> None:
    directory = tiny("qwen3").directory
    for kind in ("int8", "fp8"):
        driver = EngineDriver(directory, dtype="bfloat16", kv_cache_dtype=kind)
        model, store = driver.model.resident._model, driver.model.resident._store
        assert model is not None
        wanted = torch.cat(expected(directory, store.keeps, TYPES[kind]))
        found = [torch.cat(chunked_logits(model, store, PROMPTS, chunk)) for chunk in (7, 1024)]
        assert torch.equal(*found)
        # a key that bfloat16 rounds first may get the code next to its own
        assert (found[0] - wanted).norm() / wanted.norm() < 6e-2


def test_what_is_not_served_is_refused_by_name(tiny: Tiny) -> None:
    directory = tiny("llama").directory
    with pytest.raises(ConfigError, match="is bfloat16, and the model computes in float32; set"):
        load(directory, kv_cache_dtype="bfloat16")
    model, _ = load(directory, dtype="bfloat16", kv_cache_dtype="bfloat16")
    store = model.resident._store
    assert {tensor.dtype for tensor in store.tensors} == {torch.bfloat16}
    with pytest.raises(ConfigError, match="by an indexer the KV cache has the model's own type"):
        load(tiny("deepseek_v32").directory, kv_cache_dtype="fp8")


def test_a_gpu_that_lacks_the_type_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    capability = (8, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")

    def on_gpu(kind: KvCacheDtype) -> torch.dtype:
        settings, raw = WorkerSettings(kv_cache_dtype=kind), RawConfig({}, "config.json")
        return page_dtype_of(settings, torch.bfloat16, torch.device("cuda"), raw)

    with pytest.raises(ConfigError, match="int8 is served on a CPU only; on a GPU there is fp8"):
        on_gpu("int8")
    needs = r"fp8: FP8 \(E4M3\) needs .* 8\.9, and NVIDIA A100 has 8\.0; it has fp8_e5m2"
    with pytest.raises(ConfigError, match=needs):
        on_gpu("fp8")
    assert on_gpu("fp8_e5m2") == torch.float8_e5m2
    capability = (8, 9)
    assert on_gpu("fp8") == torch.float8_e4m3fn

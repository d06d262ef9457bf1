"""While a checkpoint is loaded, memory peaks at the weights plus about a layer.

Pages of the files do not count: the system takes them back when it needs them.
"""

import ctypes
import gc
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from tests.fakes.engine_driver import load
from tests.fakes.models import Fake, make_fake
from tokenmesh.engine.models.promotion.read_heads import Unread
from tokenmesh.engine.models.tree import build
from tokenmesh.engine.models.tree.model import HfModel

MIB: Final = 1 << 20
CONSTANT: Final = 2 * MIB
"""The KV pool and what Python keeps; a layer in float32 is a share of the rest."""
SIZES: Final[Mapping[str, Any]] = {
    "vocab_size": 2048,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
FAKES: Final = {
    # parts of 2 MiB and more lie apart from the heap, where what they were made of was
    "llama": Fake("Llama", {**SIZES, "intermediate_size": 1024, "num_hidden_layers": 14}),
    "qwen3_moe": Fake(
        "Qwen3Moe",
        {
            **SIZES,
            "num_hidden_layers": 20,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
        },
    ),
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of about 60 MB in several files."""
    made = {}
    for name, fake in FAKES.items():
        made[name] = tmp_path_factory.mktemp(name)
        model = make_fake(fake).to(torch.bfloat16)
        model.save_pretrained(made[name], max_shard_size="15MB")
        assert len(list(made[name].glob("*.safetensors"))) > 3
    return made


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def peak_of(directory: Path, impl: Any) -> tuple[Any, int]:
    """The model; bytes that were resident at most since before it was loaded."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before, seen, is_over = anonymous_bytes(), [0], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.001):
            seen.append(anonymous_bytes() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        loaded, _ = load(
            directory,
            dtype="bfloat16",
            model_impl=impl,
            max_model_len=64,
            num_gpu_blocks_override=8,
        )
        seen.append(anonymous_bytes() - before)
    finally:
        is_over.set()
        watcher.join()
    return loaded.resident._model, max(seen)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llama", "native"),
        pytest.param("llama", "promoted", marks=pytest.mark.slow),
        pytest.param("llama", "tree", marks=pytest.mark.slow),
        ("qwen3_moe", "tree"),
    ],
)
def test_memory_peaks_at_the_weights_and_a_layer(
    directories: dict[str, Path], name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "tree":
        monkeypatch.setattr(build, "promote", _refuse)
    directory = directories[name]
    impl = "native" if kind == "native" else "transformers"
    # what a first load imports, compiles and keeps for later ones is not counted
    peak_of(directory, impl)
    model, peak = peak_of(directory, impl)
    assert isinstance(model, HfModel) == (kind == "tree")
    size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    assert 50e6 < size < 70e6
    assert 0.9 * size < peak < 1.15 * size + CONSTANT


def _refuse(*_: object) -> None:
    raise Unread("a test wants the tree")

"""The scope of KV: equal for equal models wherever they lie, another one for all that differs."""

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from tests.fakes.engine_driver import load
from tests.fakes.tiny import Tiny


def scope(directory: Path, **settings: Any) -> bytes:
    given: dict[str, Any] = {"kv": {"role": "both"}, "kv_offloading_size": 0.001, "block_size": 8}
    model, _ = load(directory, **{**given, **settings})
    assert model.shared_kv is not None
    return model.shared_kv.scope


def test_a_scope_is_of_what_kv_depends_on_and_of_nothing_else(tiny: Tiny, tmp_path: Path) -> None:
    first = tiny("llama").directory
    copy = shutil.copytree(first, tmp_path / "copy")
    scopes = [
        scope(first),
        scope(first, block_size=16),
        scope(first, dtype="bfloat16"),
        scope(first, kv_cache_dtype="int8"),
        scope(first, native_kernels=False),
        scope(tiny("qwen3_moe").directory),
    ]
    assert scope(copy) == scopes[0]
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "rope_theta": 12345.0}))
    scopes.append(scope(copy))
    shutil.copy(first / "config.json", copy / "config.json")
    weights = load_file(copy / "model.safetensors")
    name = next(iter(weights))
    weights[name].view(-1)[0] += 1
    save_file(weights, copy / "model.safetensors")
    scopes.append(scope(copy))
    assert len(set(scopes)) == len(scopes)

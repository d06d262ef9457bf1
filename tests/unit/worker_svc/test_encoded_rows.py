"""A worker of Whisper takes as many streams as fit, without a setting."""

import json
from pathlib import Path
from typing import Any, Final

import pytest

from tokenmesh.services.worker_svc import encoded_rows
from tokenmesh.services.worker_svc.encoded_rows import with_fitting_rows
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.config.worker import WorkerSettings

GIB: Final = 1 << 30
BASE: Final = {
    "model_type": "whisper",
    "decoder_layers": 6,
    "max_source_positions": 1500,
    "d_model": 512,
}
ROW: Final = 6 * 2 * 1500 * 512 * 4


def rows_of(
    directory: Path,
    free_bytes: int,
    config: dict[str, Any],
    patch: pytest.MonkeyPatch,
    **given: Any,
) -> int:
    (directory / "config.json").write_text(json.dumps(config))
    patch.setattr(encoded_rows, "available_host_bytes", lambda: free_bytes)
    worker = WorkerSettings(**{"cpu_memory_utilization": 0.4, **given.pop("worker", {})})
    return with_fitting_rows(ModelSettings(model=str(directory), **given), worker).max_num_seqs


def test_rows_of_whisper_fit_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(free_bytes: int, config: dict[str, Any], **given: Any) -> int:
        return rows_of(tmp_path, free_bytes, config, monkeypatch, **given)

    assert rows(100 * GIB, BASE) == 2 * GIB // ROW
    assert rows(100 * GIB, BASE | {"dtype": "float16"}) == 2 * GIB // (ROW // 2)
    assert rows(100 * GIB, BASE, dtype="bfloat16") == 2 * GIB // (ROW // 2)
    assert rows(5 * GIB, BASE) == GIB // ROW
    assert rows(1 << 20, BASE) == 1
    assert rows(1 << 20, BASE, worker={"max_num_seqs": 9}) == 9
    assert rows(100 * GIB, BASE | {"d_model": 4}) == 256
    assert rows(1 << 20, BASE | {"model_type": "llama"}) == 256
    assert rows(100 * GIB, {"model_type": "whisper"}) == 256

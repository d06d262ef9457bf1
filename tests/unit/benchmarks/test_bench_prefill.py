"""Work of a prompt: what is counted is what the engine computes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.bench_prefill import attention_work, main
from tests.fakes.models import make_model


def test_attention_counts_the_keys_that_a_window_leaves() -> None:
    windows, length = (None, 5, 40), 17
    config: Any = SimpleNamespace(
        layers=[SimpleNamespace(window=each) for each in windows], num_heads=3, head_dim=8
    )
    seen = sum(min(at + 1, window or length) for window in windows for at in range(length))
    assert attention_work(config, length) == 4 * seen * 3 * 8


def test_a_prompt_is_compared_with_its_products(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_model("llama").save_pretrained(tmp_path)
    main([str(tmp_path), "--prompts", "40", "--rounds", "1", "--threads", "1"])
    name, line = capsys.readouterr().out.splitlines()
    assert name == str(tmp_path)
    assert line.startswith("  40 tokens: ")
    assert "ratio" in line

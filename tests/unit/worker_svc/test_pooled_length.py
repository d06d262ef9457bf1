"""The longest prompt of a model that pools: as set, else where sentence-transformers cuts it."""

from pathlib import Path

import pytest

from tests.fakes.poolers import write_json
from tokenmesh.engine.models.pooling.kind import stated_length
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.errors import ConfigError


@pytest.mark.parametrize("name", ["bert", "roberta", "xlm-roberta"])
def test_prompts_end_where_sentence_transformers_cuts_them(tmp_path: Path, name: str) -> None:
    model = ModelSettings(model=str(tmp_path))
    assert stated_length(model, 512, tmp_path) == 512
    write_json(tmp_path / f"sentence_{name}_config.json", {"max_seq_length": 128})
    assert stated_length(model, 512, tmp_path) == 128
    assert stated_length(model, 64, tmp_path) == 64


def test_the_setting_comes_first_and_is_bounded_by_the_model(tmp_path: Path) -> None:
    write_json(tmp_path / "sentence_bert_config.json", {"max_seq_length": 128})
    model = ModelSettings(model=str(tmp_path), max_model_len=256)
    assert stated_length(model, 512, tmp_path) == 256
    with pytest.raises(ConfigError, match="max_model_len is 256"):
        stated_length(model, 128, tmp_path)

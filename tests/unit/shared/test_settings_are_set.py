"""Settings are few, each is set somewhere, and a key that is a constant is refused by name."""

import json
import re
from pathlib import Path

import pytest

from tokenmesh.cli.flags import UP_FLAGS
from tokenmesh.shared.config import load_settings
from tokenmesh.shared.config.layers import Key, constants, environment_name, fields, is_section
from tokenmesh.shared.config.loader import changed, from_plain, plain_values
from tokenmesh.shared.config.settings import Settings
from tokenmesh.shared.errors import ConfigError

ROOT = Path(__file__).parents[3]
MOST = 260
PLACES = ("tests/**/*.py", "benchmarks/**/*.py", "docs/*.md", "docs/guides/*.md", "compose/**/*",
          "deploy/**/*", "README.md")  # fmt: skip
KEYS = [key for key, field in fields() if len(key) > 1 and not is_section(field)]


def setters() -> str:
    files = (path for pattern in PLACES for path in ROOT.glob(pattern) if path.is_file())
    others = (path for path in files if path != Path(__file__))
    return "\n".join(path.read_text("utf-8", errors="replace") for path in others)


def test_there_are_not_more_settings_than_an_operator_can_know() -> None:
    assert len(KEYS) <= MOST


def test_every_setting_is_set_by_a_flag_a_test_a_guide_compose_or_the_chart() -> None:
    text, flags = setters(), {flag.key for flag in UP_FLAGS}
    words = set(re.findall(r"[\w.]+", text))
    assigned = set(re.findall(r"\b(\w+)(?:=(?!=)| = |\"[:,\]])", text))
    unset = [
        ".".join(key)
        for key in KEYS
        if not any(key[:end] in flags for end in range(2, len(key) + 1))
        and key[-1] not in assigned
        and not {".".join(key), environment_name(key)} & words
    ]
    assert unset == []


@pytest.mark.parametrize("key", [("worker", "native_spin_us"), ("gateway", "breaker_s")])
def test_a_key_that_is_a_constant_is_refused_by_every_source(
    key: Key, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section, name = key
    file = tmp_path / "c.toml"
    file.write_text(f"[{section}]\n{name} = 7\n")
    with pytest.raises(ConfigError, match=f"{name} in .* is not a setting any more: it is a const"):
        load_settings(file)
    monkeypatch.setenv(environment_name(key), "7")
    with pytest.raises(ConfigError, match=f"{environment_name(key)} is not a setting any more"):
        load_settings()


def test_the_refusal_tells_the_value_and_all_keys() -> None:
    with pytest.raises(ConfigError) as refused:
        load_settings(overrides={"gateway": {"breaker_s": 1, "breaker_max_s": 5}})
    assert "it is a constant, 2.0" in refused.value.message
    assert "it is a constant, 60.0" in refused.value.message


def test_a_dump_for_a_child_keeps_constants_that_code_has_changed(tmp_path: Path) -> None:
    settings = changed(Settings(), {"gateway": {"breaker_s": 7}, "tokenizer": {"max_texts": 3}})
    values = plain_values(settings)
    assert values["constants"] == {"gateway": {"breaker_s": 7.0}, "tokenizer": {"max_texts": 3}}
    file = tmp_path / "child.json"
    file.write_text(json.dumps(values))
    for read in (from_plain(values), load_settings(file)):
        assert (read.gateway.breaker_s, read.tokenizer.max_texts) == (7, 3)


def test_a_dump_for_a_child_holds_no_constant() -> None:
    for *sections, name in constants():
        values = plain_values(Settings())
        for section in sections:
            values = values[section]
        assert name not in values
    assert not set(constants()) & set(KEYS)

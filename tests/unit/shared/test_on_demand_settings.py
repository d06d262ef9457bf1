"""Durations as Ollama reads them, and the settings of models on demand."""

import pytest
from pydantic import ValidationError

from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.config.on_demand import NEVER, duration_s


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ("5m", 300),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("250ms", 0.25),
        ("10", 10),
        (" 10s ", 10),
        ("+2m", 120),
        (0, 0),
        ("0", 0),
        (2.5, 2.5),
        (-1, NEVER),
        ("-1", NEVER),
        ("-5m", NEVER),
        (1e300, NEVER),
        (float("inf"), NEVER),
    ],
)
def test_durations_are_read_as_ollama_reads_them(given: str | float, seconds: float) -> None:
    assert duration_s(given) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "given",
    ["", "soon", "5 m", "5x", "m", "1m-2s", "-", "1e3", "9" * 19, "nan", "٣m", "²m", float("nan")],
)
def test_anything_else_is_refused(given: str | float) -> None:
    with pytest.raises(ValueError, match="duration"):
        duration_s(given)


def test_a_wrong_keep_alive_is_named() -> None:
    with pytest.raises(ValidationError, match="keep_alive"):
        ModelSettings(model="m", on_demand=True, keep_alive="soon")
    assert ModelSettings(model="m").keep_alive_s == 300

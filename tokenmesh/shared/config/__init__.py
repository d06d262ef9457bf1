"""Settings of every process: read once from flags, environment, file and defaults, then frozen.

No other package reads the environment. `load_settings` is the only function that reads sources;
`Settings()` reads nothing and holds the defaults.
"""

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tokenmesh.shared.config.loader import load_settings
    from tokenmesh.shared.config.settings import Settings

__all__ = ["Settings", "load_settings"]

_MODULES: Final = {"Settings": "settings", "load_settings": "loader"}


def __getattr__(name: str) -> Any:
    """Import on first use: processes for single jobs start in half the time without the loader."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)

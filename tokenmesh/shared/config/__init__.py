"""Settings of every process: read once from flags, environment, file and defaults, then frozen.

Nobody else reads the environment. `load_settings` is the only way that looks at the outside;
`Settings()` itself reads nothing and holds the defaults.
"""

from tokenmesh.shared.config.loader import load_settings
from tokenmesh.shared.config.settings import Settings

__all__ = ["Settings", "load_settings"]

"""The demo model: a small chat model in Hugging Face layout that ships with the package."""

from pathlib import Path
from typing import Final

PATH: Final = Path(__file__).parent
"""The folder to load it from."""

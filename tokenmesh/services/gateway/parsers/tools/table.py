"""The built-in formats of tool calls; `shared/parser_names.py` lists the same names."""

from collections.abc import Mapping
from typing import Final

_HERE: Final = "tokenmesh.services.gateway.parsers"

TOOLS: Final[Mapping[str, str]] = {
    "openai": f"{_HERE}.harmony.formats:OPENAI",
}

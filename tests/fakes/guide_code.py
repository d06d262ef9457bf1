"""The Python of a guide, as a reader would run it."""

import re
from pathlib import Path
from types import ModuleType

GUIDES = Path(__file__).resolve().parent.parent.parent / "docs/guides"
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def source_of(guide: str) -> str:
    """Its one block of Python."""
    (source,) = _BLOCK.findall((GUIDES / guide).read_text(encoding="utf-8"))
    return str(source)


def module_of(guide: str) -> ModuleType:
    """The same, imported."""
    module = ModuleType(guide.removesuffix(".md").replace("-", "_"))
    exec(compile(source_of(guide), guide, "exec"), vars(module))
    return module

"""Chat templates of the kinds that checkpoints ship, shortened but with their quirks."""

from pathlib import Path
from typing import Final

_FOLDER: Final = Path(__file__).parent / "templates"


def _read(name: str) -> str:
    return (_FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


CHATML: Final = _read("chatml")
DEEPSEEK: Final = _read("deepseek")
DOCUMENTS: Final = _read("documents")
LLAMA3: Final = _read("llama3")
MISTRAL: Final = _read("mistral")
PARTS: Final = _read("parts")
PARTS_ONLY: Final = _read("parts_only")

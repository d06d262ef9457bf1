"""Know which directories adapters may be read from."""

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tokenmesh.engine.adapters.peft_config import CONFIG_FILE, WEIGHTS_FILE
from tokenmesh.shared.config.lora import LoraSettings
from tokenmesh.shared.errors import Forbidden, InvalidInput, NotFound
from tokenmesh.shared.model_files import is_hub_id, locate_model

logger = logging.getLogger(__name__)

_MAX_PATH: Final = 4096
_NAME: Final = re.compile(r"[\w.:/ +-]{1,128}", re.ASCII)


class AdapterDirectories:
    """Resolves links before it compares: a link cannot lead out of what is allowed."""

    def __init__(self, settings: LoraSettings) -> None:
        paths = {path: Path(path).expanduser() for path in settings.lora_modules.values()}
        self._hub_ids = {path for path in paths if is_hub_id(path)}
        self._modules = [place for path, place in paths.items() if path not in self._hub_ids]
        own = [*settings.allowed_dirs, *([settings.lora_dir] if settings.lora_dir else [])]
        self._roots = [Path(path).expanduser() for path in own]
        self._dir = None if settings.lora_dir is None else Path(settings.lora_dir).expanduser()

    def locate(self, name: str, path: str) -> Path:
        """The directory of an adapter; without a path the one in `lora_dir`. Blocks.

        One that the settings name by its hub id is downloaded if need be. Raises InvalidInput,
        Forbidden for one outside of those allowed, NotFound, CheckpointError.
        """
        if not _NAME.fullmatch(name):
            raise InvalidInput(
                "lora_name has 1 to 128 characters: letters, digits, . _ - : / + and spaces",
                param="lora_name",
            )
        if not path:
            return self._resolve_name(name)
        if path in self._hub_ids:
            return locate_model(path, None, CONFIG_FILE, WEIGHTS_FILE)
        if "\0" in path or len(path) > _MAX_PATH:
            raise InvalidInput("lora_path is not a path", param="lora_path")
        wanted = Path(path).expanduser()
        found = wanted.resolve()
        named = [each.resolve() for each in self._modules]
        roots = [*(each.resolve() for each in self._roots), *named]
        if not any(found.is_relative_to(root) for root in roots):
            raise Forbidden(
                f"lora_path {path} is outside of the directories that worker.lora allows",
                param="lora_path",
            )
        if not found.is_dir():
            raise InvalidInput(f"lora_path {path} is not a directory", param="lora_path")
        if found not in named:
            _check_files(found, roots)
        return found

    def _resolve_name(self, name: str) -> Path:
        if self._dir is None or not {"", ".", ".."}.isdisjoint(name.split("/")):
            raise NotFound(f"this worker has no adapter {name!r}", param="lora_name")
        root = self._dir.resolve()
        found = (root / name).resolve()
        if found == root or not found.is_relative_to(root) or not found.is_dir():
            raise NotFound(f"this worker has no adapter {name!r}", param="lora_name")
        try:
            _check_files(found, [each.resolve() for each in self._roots])
        except Forbidden as error:
            # any client may name a model: why and where is for the operator
            logger.warning("%s: %s", found, error.message)
            raise NotFound(f"this worker has no adapter {name!r}", param="lora_name") from error
        return found


def _check_files(directory: Path, roots: Sequence[Path]) -> None:
    """Raises Forbidden where a file of an adapter is a link out of the roots."""
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        target = (directory / name).resolve()
        if not any(target.is_relative_to(root) for root in roots):
            raise Forbidden(
                f"{name} is a link out of the directories that worker.lora allows",
                param="lora_path",
            )

"""TensorShards: all tensors of a model directory, whichever safetensors file they lie in."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from tokenmesh.shared.errors import CheckpointError
from tokenmesh.shared.tensor_file import TensorFile

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"


class TensorShards:
    """The tensors of a directory by name; `wants` leaves out those that are not of interest."""

    def __init__(self, directory: Path, wants: Callable[[str], bool] = lambda name: True) -> None:
        """Read the headers of every file that holds a wanted tensor.

        Raises CheckpointError when one is missing or broken.
        """
        self.directory = directory
        self._file_by_name: dict[str, TensorFile] = {}
        index = directory / INDEX_FILE
        if index.is_file():
            self._open_indexed(index, wants)
        elif (directory / SINGLE_FILE).is_file():
            file = TensorFile(directory / SINGLE_FILE)
            self._file_by_name = {name: file for name in file if wants(name)}
        else:
            raise CheckpointError(
                f"{directory}: holds neither {SINGLE_FILE} nor {INDEX_FILE}; "
                "only safetensors checkpoints can be loaded"
            )

    def __contains__(self, name: object) -> bool:
        return name in self._file_by_name

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_by_name)

    def __len__(self) -> int:
        return len(self._file_by_name)

    def file_of(self, name: str) -> TensorFile:
        """The file that holds a tensor. Raises KeyError."""
        return self._file_by_name[name]

    def _open_indexed(self, index: Path, wants: Callable[[str], bool]) -> None:
        shard_by_name = {name: shard for name, shard in _read_index(index).items() if wants(name)}
        # a shard lies beside its index, whatever path is written there
        file_by_shard = {
            shard: TensorFile(self.directory / Path(shard).name)
            for shard in sorted(set(shard_by_name.values()))
        }
        for file in file_by_shard.values():
            self._file_by_name |= {name: file for name in file if wants(name)}
        # where several files hold a name, the index says which of them counts
        for name, shard in shard_by_name.items():
            file = self._file_by_name[name] = file_by_shard[shard]
            if name not in file:
                raise CheckpointError(f"{file.path}: tensor {name} is missing")


def _read_index(index: Path) -> dict[str, str]:
    """The index's map from tensor to file. Raises CheckpointError."""
    try:
        shard_by_name = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(shard) for name, shard in shard_by_name.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: is no valid index ({error!r})") from error

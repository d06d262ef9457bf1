"""Define what an adapter does to the head of a model that pools: matrices of its linear layers, and
whole parameters, which PEFT saves for `modules_to_save`."""

from tokenmesh.engine.adapters.peft_config import PeftConfig, refusal
from tokenmesh.engine.adapters.read_matrix import DTYPES, MatrixReader
from tokenmesh.engine.adapters.read_names import Pair, split_names
from tokenmesh.engine.adapters.sites import AdapterSites, HeadSite
from tokenmesh.kernels.lora import HeadChange
from tokenmesh.shared.tensor_file import TensorFile


class HeadParts:
    """The changes of one adapter, as they are read."""

    def __init__(self, sites: AdapterSites, config: PeftConfig) -> None:
        """Raises InvalidInput where whole modules are saved and the model has no such head."""
        self.changes: dict[str, HeadChange] = {}
        """By parameter."""
        self._sites = sites
        self._config = config
        self._wanted = {name for name in sites.head if _is_saved(name, config)}
        self._whole: dict[str, str] = {}
        """Names of tensors by parameter."""
        if config.saved and not self._wanted:
            what = f"is {list(config.saved)}: whole modules next to the adapter are served only as "
            what += "the head of a classifier; merge it into the checkpoint"
            raise refusal(config.file, "modules_to_save", what)

    def take_names(self, file: TensorFile) -> dict[str, Pair]:
        """The pairs of the file by module; whole parameters are noted. Raises InvalidInput."""
        pairs, self._whole = split_names(file, self._wanted)
        return pairs

    def check(self, file: TensorFile) -> None:
        """Raise InvalidInput where a whole parameter is missing or does not fit."""
        missing = sorted(self._wanted - self._whole.keys())
        if missing:
            what = f"holds no {missing[0]}, which modules_to_save names"
            raise refusal(file.path, "the file", what)
        for parameter, name in self._whole.items():
            entry, shape = file[name], self._sites.head[parameter].shape
            if entry.dtype not in DTYPES:
                known = ", ".join(DTYPES)
                raise refusal(file.path, name, f"has type {entry.dtype}; supported are {known}")
            if entry.shape != shape:
                what = f"has shape {list(entry.shape)}; the model needs {list(shape)}"
                raise refusal(file.path, name, what)

    def read_pair(self, reader: MatrixReader, site: HeadSite, pair: Pair, scale: float) -> None:
        """The matrices of a linear layer. Raises InvalidInput."""
        if site.name in self._whole:
            raise refusal(self._config.file, site.name, "is saved whole and has matrices too")
        a, b = reader.read(pair.a), reader.read_turned(pair.b, scale)
        self.changes[site.name] = HeadChange(a=a, b=b)

    def read_whole(self, reader: MatrixReader) -> None:
        """Parameters that replace the model's own. Raises InvalidInput."""
        for parameter in sorted(self._whole):
            reader.note(parameter)
            self.changes[parameter] = HeadChange(whole=reader.read(self._whole[parameter]))


def _is_saved(parameter: str, config: PeftConfig) -> bool:
    """Return whether PEFT saves it: the path of a module around it ends with a name of the config.

    In PEFT the end may begin within a part of the path, in contrast to what `Targets` leaves out.
    """
    parts = parameter.split(".")[:-1]
    paths = (".".join(parts[: count + 1]) for count in range(len(parts)))
    return any(path.endswith(config.saved) for path in paths)

"""A directory that PEFT has written -> the matrices of an adapter, as a model's layers take them.

Everything is checked by name and shape before a tensor is read. Only safetensors are read.
"""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from tokenmesh.kernels.lora import LoraPart, LoraWeights
from tokenmesh.services.worker_svc.adapters.adapter import HASH_CHARS, ReadAdapter
from tokenmesh.services.worker_svc.adapters.peft_config import (
    WEIGHTS_FILE,
    PeftConfig,
    read_config,
    refusal,
)
from tokenmesh.services.worker_svc.adapters.read_experts import (
    ExpertsParts,
    add_pair,
    check_once,
    experts_path,
    is_first_product,
)
from tokenmesh.services.worker_svc.adapters.sites import AdapterSites, Site
from tokenmesh.shared.errors import CheckpointError, InvalidInput
from tokenmesh.shared.tensor_file import TensorFile

_PICKLED: Final = ("adapter_model.bin", "adapter_model.pt")
_KEY: Final = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<matrix>[AB])\.weight")
_DTYPES: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_HINTS: Final = {
    "lora_embedding_": "adapters of embeddings are not served",
    "lora_magnitude_vector": "DoRA is not served; merge it into the checkpoint",
    "lora_A.bias": "biases are not served",
    "lora_B.bias": "biases are not served",
}


@dataclass(slots=True)
class _Pair:
    """Names of the two tensors of one module."""

    a: str = ""
    b: str = ""


class AdapterReader:
    """Reads adapters for one model. Used by any thread."""

    def __init__(self, sites: AdapterSites, dtype: torch.dtype, max_rank: int) -> None:
        self._sites = sites
        self._dtype = dtype
        self._max_rank = max_rank

    @torch.inference_mode()
    def read(self, directory: Path) -> ReadAdapter:
        """Blocks. Raises InvalidInput that names file and key."""
        config = read_config(directory)
        file = _open(directory)
        pairs = _pairs(file)
        layers: dict[int, ExpertsParts] = {}
        planned = [
            self._plan(config, file, module, pairs[module], layers) for module in sorted(pairs)
        ]
        digest = hashlib.sha256()
        parts: dict[int, list[LoraPart]] = {}
        for module, target, rank in planned:
            pair, scale = pairs[module], config.scale_of(module)
            digest.update(f"{module} {rank} {scale!r}\0".encode())
            a = _read(file, pair.a, digest)
            b = _read(file, pair.b, digest)
            if isinstance(target, Site):
                parts.setdefault(target.number, []).append(self._part(target, a, b, scale))
            else:
                add_pair(*target, a, b, scale, self._dtype)
        content_hash = digest.hexdigest()[:HASH_CHARS]
        return ReadAdapter(
            matrices=LoraWeights(
                {number: tuple(each) for number, each in parts.items()},
                self._sites.num_banks,
                content_hash,
                {number: each.matrices() for number, each in layers.items()},
            ),
            content_hash=content_hash,
            rank=max(rank for _, _, rank in planned),
            base_model=config.base_model,
        )

    def _plan(
        self,
        config: PeftConfig,
        file: TensorFile,
        module: str,
        pair: _Pair,
        layers: dict[int, ExpertsParts],
    ) -> tuple[str, Site | tuple[ExpertsParts, bool], int]:
        """The site and the rank of a module, once its tensors have proved to fit.

        layers: of experts that have been planned, by the number of their bank.
        """
        name = pair.a or pair.b
        path = experts_path(module)
        site, experts = self._sites.find(module), self._sites.experts.get(path)
        if site is None and experts is None:
            why = self._sites.refusal(path) or f"the model has no linear layer {module}"
            raise refusal(file.path, name, f"cannot be applied: {why}{_trained_on(config)}")
        for matrix, stored in (("lora_A", pair.a), ("lora_B", pair.b)):
            if not stored:
                raise refusal(file.path, name, f"has no {matrix} beside it")
            if (dtype := file[stored].dtype) not in _DTYPES:
                known = ", ".join(_DTYPES)
                raise refusal(file.path, stored, f"has type {dtype}; supported are {known}")
        rank = config.rank_of(module)
        if rank > self._max_rank:
            limit = f"max_lora_rank allows {self._max_rank}"
            raise refusal(config.file, "r", f"is {rank} for {module}; {limit}")
        if experts is not None:
            is_first = is_first_product(config, file, experts, path, (pair.a, pair.b))
            parts = layers.setdefault(experts.number, ExpertsParts(experts))
            check_once(parts, is_first, file, name)
            return module, (parts, is_first), rank
        assert site is not None
        for stored, shape in ((pair.a, (rank, site.inputs)), (pair.b, (site.outputs, rank))):
            if file[stored].shape != shape:
                what = f"has shape {list(file[stored].shape)}; the model needs {list(shape)}"
                raise refusal(file.path, stored, f"{what}{_trained_on(config)}")
        return module, site, rank

    def _part(self, site: Site, a: torch.Tensor, b: torch.Tensor, scale: float) -> LoraPart:
        b = b.float() * scale
        if site.turned is not None:
            b = site.turned.turn(b)
        return LoraPart(
            a.to(self._dtype).contiguous(), b.to(self._dtype).t().contiguous(), site.first
        )


def _open(directory: Path) -> TensorFile:
    path = directory / WEIGHTS_FILE
    if not path.is_file():
        for name in _PICKLED:
            if (directory / name).exists():
                what = f"{directory / name}: is pickled, and such files can run code"
                raise InvalidInput(f"{what}; only {WEIGHTS_FILE} is read", param="lora_path")
        raise InvalidInput(f"{directory}: holds no {WEIGHTS_FILE}", param="lora_path")
    try:
        return TensorFile(path)
    except CheckpointError as error:
        raise InvalidInput(error.message, param="lora_path") from error


def _pairs(file: TensorFile) -> dict[str, _Pair]:
    pairs: dict[str, _Pair] = {}
    for name in file:
        match = _KEY.fullmatch(name)
        if match is None:
            known = (why for part, why in _HINTS.items() if part in name)
            why = next(known, "it is not a matrix of a linear layer, as PEFT names them")
            raise refusal(file.path, name, f"is not served: {why}")
        pair = pairs.setdefault(match["module"], _Pair())
        setattr(pair, match["matrix"].lower(), name)
    if not pairs:
        raise InvalidInput(f"{file.path}: holds no tensor", param="lora_path")
    return pairs


def _read(file: TensorFile, name: str, digest: "hashlib._Hash") -> torch.Tensor:
    entry = file[name]
    tensor = torch.empty(entry.shape, dtype=_DTYPES[entry.dtype], device="cpu")
    data = tensor.view(-1).view(torch.uint8).numpy().data
    try:
        file.read_into(name, data)
    except CheckpointError as error:
        raise InvalidInput(error.message, param="lora_path") from error
    digest.update(f"{entry.dtype} {entry.shape}\0".encode())
    digest.update(data)
    if not bool(torch.isfinite(tensor).all()):
        raise refusal(file.path, name, "holds numbers that are not finite")
    return tensor


def _trained_on(config: PeftConfig) -> str:
    return "" if config.base_model is None else f" (the adapter was trained on {config.base_model})"

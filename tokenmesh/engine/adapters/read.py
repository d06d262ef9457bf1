"""A directory that PEFT has written -> the matrices of an adapter, as a model's layers take them.

Everything is checked by name and shape before a tensor is read. Only safetensors are read.
"""

import hashlib
import logging
from pathlib import Path
from typing import Final

import torch

from tokenmesh.engine.adapters.adapter import HASH_CHARS, ReadAdapter
from tokenmesh.engine.adapters.peft_config import (
    WEIGHTS_FILE,
    PeftConfig,
    read_config,
    refusal,
    without_folder,
)
from tokenmesh.engine.adapters.read_experts import (
    ExpertsParts,
    add_pair,
    check_once,
    experts_path,
    is_first_product,
    parameter_of,
)
from tokenmesh.engine.adapters.read_head import HeadParts
from tokenmesh.engine.adapters.read_matrix import DTYPES, MatrixReader
from tokenmesh.engine.adapters.read_names import Pair, why_missing
from tokenmesh.engine.adapters.sites import ELSEWHERE, AdapterSites, HeadSite, Site
from tokenmesh.engine.adapters.targets import BadTarget
from tokenmesh.kernels.lora import LoraPart, LoraWeights
from tokenmesh.shared.errors import CheckpointError, InvalidInput
from tokenmesh.shared.tensor_file import TensorFile

_PICKLED: Final = ("adapter_model.bin", "adapter_model.pt")
_MAX_HEADER_BYTES: Final = 8 << 20
"""Decoding it holds the interpreter. An adapter of 1,000 tensors has 150 KiB."""

logger = logging.getLogger(__name__)

_Target = Site | HeadSite | tuple[ExpertsParts, bool]
"""Experts: their parts, and whether the pair is of the first product."""


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
        head = HeadParts(self._sites, config)
        file = _open(directory)
        pairs = head.take_names(file)
        planned = self._plan_all(config, file, pairs)
        head.check(file)
        digest = hashlib.sha256()
        reader = MatrixReader(file, digest, self._dtype)
        parts: dict[int, list[LoraPart]] = {}
        layers: dict[int, ExpertsParts] = {}
        for module, target, rank in planned:
            pair, scale = pairs[module], config.scale_of(_key_of(module, target))
            digest.update(f"{module} {rank} {scale!r}\0".encode())
            if isinstance(target, Site):
                part = _read_part(reader, target, pair, scale)
                if target.number != ELSEWHERE:
                    parts.setdefault(target.number, []).append(part)
            elif isinstance(target, HeadSite):
                head.read_pair(reader, target, pair, scale)
            else:
                layer, is_first = target
                layers[layer.site.number] = layer
                add_pair(layer, reader, (pair.a, pair.b), scale, is_first=is_first)
        head.read_whole(reader)
        content_hash = digest.hexdigest()[:HASH_CHARS]
        weights = LoraWeights(
            {number: tuple(each) for number, each in parts.items()},
            self._sites.num_banks,
            content_hash,
            {number: each.matrices() for number, each in layers.items()},
            head.changes,
        )
        weights.native  # noqa: B018  made here, not in the first step that needs it
        return ReadAdapter(
            matrices=weights,
            content_hash=content_hash,
            rank=max((rank for _, _, rank in planned), default=0),
            base_model=config.base_model,
        )

    def _plan_all(
        self, config: PeftConfig, file: TensorFile, pairs: dict[str, Pair]
    ) -> list[tuple[str, _Target, int]]:
        """Each module that has an effect, with its site and rank."""
        layers: dict[int, ExpertsParts] = {}
        planned: list[tuple[str, _Target, int]] = []
        seen: set[Site | HeadSite] = set()
        unused = 0
        for module in sorted(pairs):
            if self._sites.is_unused(module):
                continue
            if not self._is_chosen(config, module):
                unused += 1
                continue
            target, rank = self._plan(config, file, module, pairs[module], layers)
            if isinstance(target, Site | HeadSite):
                if target in seen:
                    raise refusal(file.path, module, "has the matrices of one layer twice")
                seen.add(target)
            elif not config.targets.has_parameter(_key_of(module, target)):
                unused += 1
                continue
            planned.append((module, target, rank))
        if unused and not planned:
            raise refusal(config.file, "target_modules", "chooses none of the file's modules")
        if unused:
            what = "%s: target_modules and exclude_modules leave %d of the file's %d modules out"
            logger.warning(what, config.file, unused, len(pairs))
        return planned

    def _is_chosen(self, config: PeftConfig, module: str) -> bool:
        """Return whether the config lets a module be adapted; of experts, the parameters decide."""
        try:
            is_experts = self._sites.find_experts(experts_path(module)) is not None
            return is_experts or config.targets.has_module(module)
        except BadTarget as error:
            raise refusal(config.file, error.key, error.problem) from error

    def _plan(
        self,
        config: PeftConfig,
        file: TensorFile,
        module: str,
        pair: Pair,
        layers: dict[int, ExpertsParts],
    ) -> tuple[_Target, int]:
        """The site and the rank of a module, once its tensors have proved to fit.

        layers: of experts that have been planned, by the number of their bank.
        """
        name = pair.a or pair.b
        path = experts_path(module)
        site, experts = self._sites.find(module), self._sites.find_experts(path)
        head = self._sites.head.get(f"{module}.weight")
        if head is not None and not head.is_linear:
            head = None
        if site is None and experts is None and head is None:
            why = self._sites.refusal(path) or why_missing(module)
            raise refusal(file.path, name, f"cannot be applied: {why}{_trained_on(config)}")
        for matrix, stored in (("lora_A", pair.a), ("lora_B", pair.b)):
            if not stored:
                raise refusal(file.path, name, f"has no {matrix} next to it")
            if (dtype := file[stored].dtype) not in DTYPES:
                known = ", ".join(DTYPES)
                raise refusal(file.path, stored, f"has type {dtype}; supported are {known}")
        if experts is not None:
            is_first = is_first_product(config, file, experts, path, (pair.a, pair.b))
            parts = layers.setdefault(experts.number, ExpertsParts(experts))
            check_once(parts, is_first, file, name)
            return (parts, is_first), self._rank_of(config, _key_of(module, (parts, is_first)))
        rank = self._rank_of(config, module)
        if site is not None:
            outputs, inputs = site.shape
        else:
            assert head is not None
            outputs, inputs = head.shape
        for stored, shape in ((pair.a, (rank, inputs)), (pair.b, (outputs, rank))):
            if file[stored].shape != shape:
                what = f"has shape {list(file[stored].shape)}; the model needs {list(shape)}"
                raise refusal(file.path, stored, f"{what}{_trained_on(config)}")
        found: Site | HeadSite | None = site or head
        assert found is not None
        return found, rank

    def _rank_of(self, config: PeftConfig, key: str) -> int:
        rank = config.rank_of(key)
        if rank > self._max_rank:
            limit = f"max_lora_rank allows {self._max_rank}"
            raise refusal(config.file, "r", f"is {rank} for {key}; {limit}")
        return rank


def _key_of(module: str, target: _Target) -> str:
    """Return what the keys of a config match: the module, or the parameter of experts."""
    if isinstance(target, Site | HeadSite):
        return module
    parts, is_first = target
    return parameter_of(parts.site, experts_path(module), is_first=is_first)


def _read_part(reader: MatrixReader, site: Site, pair: Pair, scale: float) -> LoraPart:
    taken = site.taken
    a = reader.read(pair.a, None if taken is None else taken.columns)
    b = reader.read_turned(pair.b, scale, None if taken is None else taken.rows)
    if site.turned is not None:
        b = reader.reordered(b, site.turned.turn(torch.arange(site.outputs)))
    return LoraPart(a, b, site.first)


def _open(directory: Path) -> TensorFile:
    path = directory / WEIGHTS_FILE
    if not path.is_file():
        for name in _PICKLED:
            if (directory / name).exists():
                what = f"{name}: is pickled, and such files can run code"
                raise InvalidInput(f"{what}; only {WEIGHTS_FILE} is read", param="lora_path")
        raise InvalidInput(f"the adapter holds no {WEIGHTS_FILE}", param="lora_path")
    try:
        return TensorFile(path, _MAX_HEADER_BYTES)
    except CheckpointError as error:
        raise InvalidInput(without_folder(path, error)[:1000], param="lora_path") from error


def _trained_on(config: PeftConfig) -> str:
    base = config.base_model
    return "" if base is None else f" (the adapter was trained on {base[:200]})"

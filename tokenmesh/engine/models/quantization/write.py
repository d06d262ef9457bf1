"""Write a quantized copy of a checkpoint, in the format of compressed-tensors.

    python -m tokenmesh.engine.models.quantization.write MODEL OUT --format int4

The weights of projections are rounded, to the nearest or by GPTQ. All other tensors and files are
copied. One layer, or a file of at most `MOST_BYTES` and a tensor, is in memory at a time.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Final

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tokenmesh.engine.models.quantization.calibrate import Calibration, Calibrator
from tokenmesh.engine.models.quantization.gptq import GptqSpec
from tokenmesh.engine.models.quantization.read import KEYS, MODELOPT_FILE
from tokenmesh.engine.models.quantization.write_parts import (
    FORMATS,
    calibrated_parts,
    config_of,
    rounded_parts,
)
from tokenmesh.engine.models.raw_config import read_json
from tokenmesh.kernels.linear.formats.round import INT4_GROUP, Rounding, rounded
from tokenmesh.shared.errors import CheckpointError, ConfigError, TokenMeshError
from tokenmesh.shared.model_files import SERVED_FILES, locate_model
from tokenmesh.shared.tensor_file import INDEX_FILE, SINGLE_FILE

_ENDINGS: Final = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
"""These end the names of the weights that are rounded."""
_OTHERS: Final = ("vision", "visual", "audio", "multi_modal", "mm_projector", "encoder.")
"""In names of modules that other services run, or that stay plain."""
_FLOATS: Final = (torch.float32, torch.float16, torch.bfloat16)
_GROUPS_OF: Final = 16
"""It holds what a group size of int4 is a multiple of."""


MOST_BYTES: Final = 1 << 30
"""A larger file of the checkpoint becomes several, which are written one after the other."""
DEFAULT_TOKENS: Final = 16384
DEFAULT_GROUP: Final = 128
"""This is the size of a group of GPTQ's int4."""

_File = tuple[str, dict[str, torch.Tensor], int]
"""Its name, its tensors, and how many of them were rounded."""
_Parts = tuple[dict[str, torch.Tensor], bool]
"""It holds what a tensor of the source becomes, and whether it was rounded."""


def write_quantized(
    model: str, out: Path, to: Rounding, calibration: Calibration | None = None
) -> int:
    """Copy a checkpoint with rounded weights to a new directory; how many were rounded.

    calibration: for GPTQ; None: weights are rounded to the nearest. Nothing is left in the
    directory after an error. Raises CheckpointError for a checkpoint that cannot be read, is
    quantized or has numbers that are not finite; ConfigError for a directory that holds something,
    and for a calibration that does not fit.
    """
    source = locate_model(model, None, *SERVED_FILES)
    raw = read_json(source / "config.json")
    if any(raw.values.get(key) for key in KEYS) or (source / MODELOPT_FILE).exists():
        raise CheckpointError(f"{model}: is quantized already", param="MODEL")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already", param="OUT")
    files = _files(source)
    plain: list[str] = []
    if calibration is None:
        parts = _rounded_files(source, files, to, plain)
    else:
        calibrator = Calibrator.open(source, raw, calibration)
        parts = _calibrated_files(calibrator, source, files, plain)
    out.mkdir(parents=True, exist_ok=True)
    try:
        count = _write_files(out, parts)
        if not count:
            raise CheckpointError(f"{model}: has no projections to round", param="MODEL")
        for each in source.iterdir():
            if each.is_file() and ".safetensors" not in each.name and each.suffix != ".bin":
                shutil.copyfile(each, out / each.name)
        spec = None if calibration is None else calibration.spec
        config = {**raw.values, KEYS[0]: config_of(to, plain, spec)}
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    except BaseException:
        shutil.rmtree(out)
        raise
    return count


def _write_files(out: Path, parts: Iterator[_File]) -> int:
    """Write the files and their index; how many weights were rounded."""
    place: dict[str, str] = {}
    count = 0
    for file, stored, number in parts:
        save_file(stored, out / file, metadata={"format": "pt"})
        place |= dict.fromkeys(stored, file)
        count += number
        del stored  # before the next ones are made
    if set(place.values()) != {SINGLE_FILE}:
        (out / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": place}))
    return count


def _files(source: Path) -> list[str]:
    index = source / INDEX_FILE
    if index.is_file():
        weight_map = read_json(index).values.get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{index}: has no weight_map", param="MODEL")
        return sorted({Path(str(name)).name for name in weight_map.values()})
    if not (source / SINGLE_FILE).is_file():
        raise CheckpointError(f"{source}: holds no {SINGLE_FILE}", param="MODEL")
    return [SINGLE_FILE]


def _rounded_files(
    source: Path, files: Sequence[str], to: Rounding, plain: list[str]
) -> Iterator[_File]:
    """Each file with its weights rounded to the nearest; adds modules that stay plain."""
    for file in files:
        yield from _in_pieces(source / file, file, _converted(source / file, to, plain))


def _calibrated_files(
    calibrator: Calibrator, source: Path, files: Sequence[str], plain: list[str]
) -> Iterator[_File]:
    """A file with the projections of each layer, then the source's files without them."""
    done: set[str] = set()
    for number, layer in enumerate(calibrator.layers()):
        stored: dict[str, torch.Tensor] = {}
        for name, weight in layer.items():
            stored |= _named(name, calibrated_parts(weight, calibrator.spec))
        done |= set(layer)
        yield f"model-layer-{number:05}.safetensors", stored, len(layer)
    for number, file in enumerate(files):
        rest = _rest(source / file, done, plain)
        yield from _in_pieces(source / file, f"model-rest-{number:05}.safetensors", rest)


def _in_pieces(source: Path, name: str, tensors: Iterator[_Parts]) -> Iterator[_File]:
    """The tensors of one file, as one of that name; as several where `source` is large."""
    is_one = source.stat().st_size <= MOST_BYTES
    stored: dict[str, torch.Tensor] = {}
    count = num_bytes = number = 0

    def named() -> str:
        return name if is_one else f"{Path(name).stem}-{number:05}.safetensors"

    for parts, is_rounded in tensors:
        stored |= parts
        count += is_rounded
        num_bytes += sum(each.nbytes for each in parts.values())
        if not is_one and num_bytes >= MOST_BYTES:
            yield named(), stored, count
            stored, count, num_bytes, number = {}, 0, 0, number + 1
    if stored or is_one:
        yield named(), stored, count


def _converted(path: Path, to: Rounding, plain: list[str]) -> Iterator[_Parts]:
    """The tensors of one file with its weights rounded; adds modules that stay plain."""
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a dict
            tensor = file.get_tensor(name)
            if not _is_rounded(name, tensor, to):
                if _is_matrix(name, tensor):
                    plain.append(name.removesuffix(".weight"))
                yield {name: tensor}, False
                continue
            if not tensor.isfinite().all():
                problem = "has numbers that are infinite or NaN"
                raise CheckpointError(f"{path}: tensor {name} {problem}")
            yield _named(name, rounded_parts(rounded(tensor, to), to)), True


def _rest(path: Path, done: Collection[str], plain: list[str]) -> Iterator[_Parts]:
    """The tensors of one file that are not in `done`; adds modules that stay plain."""
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a dict
            if name not in done:
                tensor = file.get_tensor(name)
                if _is_matrix(name, tensor):
                    plain.append(name.removesuffix(".weight"))
                yield {name: tensor}, False


def _is_matrix(name: str, tensor: torch.Tensor) -> bool:
    return tensor.ndim == 2 and name.endswith(".weight")


def _named(name: str, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parts of a weight by their names in the file."""
    module = name.removesuffix(".weight")
    return {f"{module}.{part}": tensor for part, tensor in parts.items()}


def _is_rounded(name: str, tensor: torch.Tensor, to: Rounding) -> bool:
    if tensor.ndim != 2 or tensor.dtype not in _FLOATS or not name.endswith(_ENDINGS):
        return False
    fits = to != "int4" or tensor.shape[1] % INT4_GROUP == 0
    return fits and not any(each in name for each in _OTHERS)


def _calibration(asked: argparse.Namespace) -> Calibration | None:
    """Raises ConfigError for options that do not go together."""
    own = ("calibration", "calibration_tokens", "group_size", "asymmetric", "no_act_order")
    given = [f"--{name.replace('_', '-')}" for name in own if getattr(asked, name)]
    if asked.method == "rtn":
        if given:
            raise ConfigError(f"{given[0]} is for --method gptq", param=given[0])
        return None
    if asked.format == "fp8":
        problem = "fp8 is rounded to the nearest; --method gptq is for int4 and int8"
        raise ConfigError(problem, param="--method")
    if asked.calibration is None:
        raise ConfigError("--method gptq needs --calibration FILE", param="--calibration")
    max_tokens = asked.calibration_tokens or DEFAULT_TOKENS
    if asked.format == "int8":
        for name in ("--group-size", "--asymmetric", "--no-act-order"):
            if name in given:
                raise ConfigError(f"{name} is for --format int4", param=name)
        return Calibration(asked.calibration.expanduser(), max_tokens, GptqSpec(8, None))
    size = asked.group_size or DEFAULT_GROUP
    if size % _GROUPS_OF:
        problem = f"is {size}, not a multiple of {_GROUPS_OF}"
        raise ConfigError(f"--group-size {problem}", param="--group-size")
    spec = GptqSpec(4, size, not asked.asymmetric, not asked.no_act_order)
    return Calibration(asked.calibration.expanduser(), max_tokens, spec)


def main(arguments: Sequence[str] | None = None) -> int:
    """Takes the arguments of `tokenmesh quantize`; 1 with the reason on stderr for an error."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--format", choices=FORMATS, required=True)
    parser.add_argument("--method", choices=("rtn", "gptq"), default="rtn")
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--calibration-tokens", type=int)
    parser.add_argument("--group-size", type=int)
    parser.add_argument("--asymmetric", action="store_true")
    parser.add_argument("--no-act-order", action="store_true")
    asked = parser.parse_args(arguments)
    to: Rounding = asked.format
    out = asked.out.expanduser()
    try:
        count = write_quantized(asked.model, out, to, _calibration(asked))
    except TokenMeshError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    sys.stdout.write(f"{count} weights are {to} in {out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Write a quantized copy of a checkpoint, in the format of compressed-tensors.

    python -m tokenmesh.services.worker_svc.models.quantization.write MODEL OUT int4

The weights of projections are rounded to the nearest. All other tensors and files are copied. One
file of the checkpoint is in memory at a time.
"""

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tokenmesh.kernels.codes import Codes
from tokenmesh.kernels.linear.formats.round import INT4_GROUP, Rounding, rounded
from tokenmesh.services.worker_svc.models.quantization.read import KEYS, MODELOPT_FILE
from tokenmesh.services.worker_svc.models.raw_config import read_json
from tokenmesh.shared.errors import CheckpointError, ConfigError, TokenMeshError
from tokenmesh.shared.model_files import SERVED_FILES, locate_model
from tokenmesh.shared.tensor_file import INDEX_FILE, SINGLE_FILE

_ENDINGS: Final = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
"""Of the weights that are rounded."""
_OTHERS: Final = ("vision", "visual", "audio", "multi_modal", "mm_projector", "encoder.")
"""In names of modules that other services run, or that stay plain."""
_FLOATS: Final = (torch.float32, torch.float16, torch.bfloat16)
_FORMATS: Final[dict[Rounding, str]] = {
    "int8": "int-quantized",
    "int4": "pack-quantized",
    "fp8": "float-quantized",
}
_IN_WORD: Final = 8


def write_quantized(model: str, out: Path, to: Rounding) -> int:
    """Copy a checkpoint with rounded weights to a new directory; how many were rounded.

    Raises CheckpointError for one that cannot be read or is quantized, ConfigError for a directory
    that holds something.
    """
    source = locate_model(model, None, *SERVED_FILES)
    raw = read_json(source / "config.json")
    if any(raw.values.get(key) for key in KEYS) or (source / MODELOPT_FILE).exists():
        raise CheckpointError(f"{model}: is quantized already", param="MODEL")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already", param="OUT")
    files = _files(source)
    out.mkdir(parents=True, exist_ok=True)
    plain: list[str] = []
    place: dict[str, str] = {}
    count = 0
    for file in files:
        stored, number = _converted(source / file, to, plain)
        save_file(stored, out / file, metadata={"format": "pt"})
        place |= dict.fromkeys(stored, file)
        count += number
    if not count:
        shutil.rmtree(out)
        raise CheckpointError(f"{model}: has no projections to round", param="MODEL")
    if files != [SINGLE_FILE]:
        (out / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": place}))
    config = {**raw.values, KEYS[0]: _config(to, plain)}
    for each in source.iterdir():
        if each.is_file() and ".safetensors" not in each.name and each.suffix != ".bin":
            shutil.copyfile(each, out / each.name)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
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


def _converted(path: Path, to: Rounding, plain: list[str]) -> tuple[dict[str, torch.Tensor], int]:
    """The tensors of one file, and how many were rounded; adds modules that stay plain."""
    stored: dict[str, torch.Tensor] = {}
    count = 0
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a dict
            tensor = file.get_tensor(name)
            module = name.removesuffix(".weight")
            if _is_rounded(name, tensor, to):
                parts = _parts(rounded(tensor, to), to)
                stored |= {f"{module}.{part}": each for part, each in parts.items()}
                count += 1
                continue
            stored[name] = tensor
            if tensor.ndim == 2 and name.endswith(".weight"):
                plain.append(module)
    return stored, count


def _is_rounded(name: str, tensor: torch.Tensor, to: Rounding) -> bool:
    if tensor.ndim != 2 or tensor.dtype not in _FLOATS or not name.endswith(_ENDINGS):
        return False
    fits = to != "int4" or tensor.shape[1] % INT4_GROUP == 0
    return fits and not any(each in name for each in _OTHERS)


def _parts(codes: Codes, to: Rounding) -> dict[str, torch.Tensor]:
    """The tensors of a module."""
    if to == "fp8":
        weight = codes.numbers.view(torch.float8_e4m3fn)
        return {"weight": weight, "weight_scale": codes.scales}
    if to == "int8":
        return {"weight": (codes.numbers ^ 128).view(torch.int8), "weight_scale": codes.scales}
    eight = codes.numbers.long().view(len(codes.numbers), -1, _IN_WORD)
    words = (eight << (4 * torch.arange(_IN_WORD))).sum(-1)
    signed = torch.where(words >= 1 << 31, words - (1 << 32), words)
    return {
        "weight_packed": signed.to(torch.int32),
        "weight_scale": codes.scales.contiguous(),
        "weight_shape": torch.tensor(codes.shape),
    }


def _config(to: Rounding, plain: Sequence[str]) -> dict[str, Any]:
    kind = "float" if to == "fp8" else "int"
    bits = 4 if to == "int4" else 8
    common = {"num_bits": bits, "type": kind, "symmetric": True}
    weights = {**common, "dynamic": False, "strategy": "channel"}
    activations = {**common, "dynamic": True, "strategy": "token"}
    if to == "int4":
        weights |= {"strategy": "group", "group_size": INT4_GROUP}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None if to == "int4" else activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": _FORMATS[to],
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": sorted({*plain, "lm_head"}),
        "kv_cache_scheme": None,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """MODEL OUT FORMAT; 1 with a line that says why where it fails."""
    model, out, asked = sys.argv[1:] if arguments is None else arguments
    to: Rounding | None = next((each for each in _FORMATS if each == asked), None)
    if to is None:
        sys.stderr.write(f"format is {asked!r}; supported are {', '.join(_FORMATS)}\n")
        return 2
    try:
        count = write_quantized(model, Path(out).expanduser(), to)
    except TokenMeshError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    sys.stdout.write(f"{count} weights are {to} in {out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

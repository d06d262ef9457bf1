"""Compile the C kernels at first use, once for each user, and load them.

They need an x86-64 processor with AVX-512 and its products of bytes or at least with AVX2, Linux,
and a C compiler. Where one of these is missing the callers take their torch path. They use the
instructions that torch does: `ATEN_CPU_CAPABILITY=avx2` keeps both from AVX-512. `python -m
tokenmesh.kernels.native FOLDER` compiles them ahead, for an image whose user can write nothing.
"""

import ctypes
import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import torch

COMPILE_TIMEOUT_S: Final = 120.0
_FLAGS: Final = ("-std=gnu11", "-O3", "-fPIC", "-fno-math-errno", "-mfma", "-mbmi2")
_AVX2: Final = ("-mavx2", "-mf16c")
_VNNI: Final = tuple(f"-mavx512{name}" for name in ("f", "bw", "vl", "dq", "vnni"))
_AVX512: Final = (*_VNNI, "-mavx512bf16")
_AMX, _WITHOUT_AMX = "AVX-512 with AMX", "AVX-512 with VBMI"
_TILES: Final = ("amx_tile", "amx_int8", "amx_bf16")
_VBMI: Final = (*_AVX512, "-mavx512vbmi")
LEVELS: Final = {
    _AMX: (*_VBMI, "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
    _WITHOUT_AMX: _VBMI,
    "AVX-512": _AVX512,
    "AVX-512 without bfloat16": _VNNI,
    "AVX2": _AVX2,
}
"""Flags of the instructions that the kernels are compiled for, the fastest first."""
_SOURCES: Final = (
    "amx.c",
    "pool.c",
    "blocks.c",
    "gemm.c",
    "quantized.c",
    "experts.c",
    "routed.c",
    "noise.c",
    "elementwise.c",
    "program.c",
    "states.c",
    "lora.c",
    "rows.c",
    "shorts.c",
)
_HERE: Final = Path(__file__).parent

logger = logging.getLogger(__name__)


class NativeUnavailable(Exception):
    """The C kernels cannot be built or loaded; the message says why."""


def load(folder: Path) -> ctypes.CDLL:
    """The kernels, compiled into `folder` (which may begin with ~) unless they are there.

    Raises NativeUnavailable.
    """
    name = level()
    try:
        try:
            library = compiled(folder.expanduser(), name)
        except subprocess.CalledProcessError:
            if name != _AMX:
                raise
            # GCC before 11 does not know its instructions
            name = _WITHOUT_AMX
            library = compiled(folder.expanduser(), name)
        kernels = ctypes.CDLL(str(library))
    # RuntimeError: a user without a home
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        raise NativeUnavailable(str(getattr(error, "stderr", None) or error)) from error
    if name == _AMX and not kernels.tm_use_amx(ctypes.c_int(1)):
        logger.info("the system does not let this process use AMX")
    logger.info("the C kernels use %s", name)
    return kernels


def level() -> str:
    """Return the level of `LEVELS` that this processor can run and torch uses.

    Raises NativeUnavailable.
    """
    used, there = torch.backends.cpu.get_cpu_capability(), torch.cpu.get_capabilities()
    if used == "AVX512" and there.get("avx512_vnni"):
        if not there.get("avx512_bf16"):
            return "AVX-512 without bfloat16"
        if not there.get("avx512_vbmi"):
            return "AVX-512"
        return _AMX if all(there.get(name) for name in _TILES) else _WITHOUT_AMX
    if used in ("AVX2", "AVX512") and all(there.get(name) for name in ("fma3", "f16c", "bmi2")):
        return "AVX2"
    raise NativeUnavailable("the processor has no AVX2")


def compiled(folder: Path, name: str) -> Path:
    """The shared library of these very sources for a level in `folder`, made unless it is there.

    Raises OSError or subprocess.SubprocessError.
    """
    sources = sorted(p for p in _HERE.iterdir() if p.suffix in {".c", ".h", ".inc"})
    flags = (*_FLAGS, *LEVELS[name])
    digest = hashlib.sha256(" ".join((*flags, *_SOURCES)).encode())
    for source in sources:
        digest.update(source.read_bytes())
    _check(folder)
    target = folder / f"kernels-{digest.hexdigest()[:24]}.so"
    if not target.exists():
        with (folder / ".lock").open("w") as lock:
            # workers that start together compile once
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                _compile(target, flags)
    return target


def _compile(target: Path, flags: tuple[str, ...]) -> None:
    """Each source by itself, as many at a time as there are processors."""
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        objects = [str(made.with_name(f"{source}.o")) for source in _SOURCES]
        compiler = _compiler()
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            runs = [
                pool.submit(_run, compiler, *flags, "-c", str(_HERE / source), "-o", written)
                for source, written in zip(_SOURCES, objects, strict=True)
            ]
            try:
                for run in runs:
                    run.result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
        _run(compiler, *flags, "-shared", "-o", str(made), *objects, "-lpthread", "-lm")
        made.replace(target)
    logger.info("compiled the C kernels into %s", target)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=COMPILE_TIMEOUT_S, capture_output=True, text=True)


def _compiler() -> str:
    found = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if found is None:
        raise FileNotFoundError("no C compiler (cc) was found")
    return found


def _check(folder: Path) -> None:
    """Only this user or root may write there: what lies there is run. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = folder.stat()
    if status.st_uid not in (0, os.getuid()) or status.st_mode & 0o022:
        raise PermissionError(f"{folder} can be written by other users")

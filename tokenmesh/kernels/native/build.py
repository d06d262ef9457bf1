"""Compile the C kernels at first use, once for each user, and load them.

They need an x86-64 processor with AVX-512 and its bfloat16 products, Linux, and a C compiler.
Where one of these is missing the callers take their torch path. `python -m
tokenmesh.kernels.native FOLDER` compiles them ahead, for an image whose user can write nothing.
"""

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from itertools import combinations
from pathlib import Path
from typing import Final

import torch

COMPILE_TIMEOUT_S: Final = 120.0
_FLAGS: Final = (
    *("-std=gnu11", "-O3", "-fPIC", "-shared", "-fno-math-errno"),
    *(
        "-mavx512f",
        "-mavx512bw",
        "-mavx512vl",
        "-mavx512dq",
        "-mavx512bf16",
        "-mavx512vnni",
        "-mfma",
        "-mbmi2",
    ),
)
_EXTRA_FLAGS: Final = {"avx512vbmi": "-mavx512vbmi"}
"""Flags of instructions that some kernels need, by the processor's name for them."""
_SOURCES: Final = (
    "pool.c",
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

    Raises Unavailable.
    """
    if not torch.cpu._is_avx512_bf16_supported():
        raise NativeUnavailable("the processor has no AVX-512 BF16")
    try:
        return ctypes.CDLL(str(compiled(folder.expanduser())))
    # RuntimeError: a user without a home
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        raise NativeUnavailable(str(getattr(error, "stderr", None) or error)) from error


def compiled(folder: Path, extra: tuple[str, ...] | None = None) -> Path:
    """The shared library of these very sources in `folder`, made unless it is there.

    With these extra flags, or with those that this processor can run.

    Raises OSError or subprocess.SubprocessError.
    """
    sources = sorted(p for p in _HERE.iterdir() if p.suffix in {".c", ".h", ".inc"})
    flags = (*_FLAGS, *(extra_flags() if extra is None else extra))
    digest = hashlib.sha256(" ".join((*flags, *_SOURCES)).encode())
    for source in sources:
        digest.update(source.read_bytes())
    _check(folder)
    target = folder / f"kernels-{digest.hexdigest()[:24]}.so"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / target.name
            command = [_compiler(), *flags, "-o", str(made)]
            command += [str(_HERE / name) for name in _SOURCES] + ["-lpthread", "-lm"]
            subprocess.run(
                command, check=True, timeout=COMPILE_TIMEOUT_S, capture_output=True, text=True
            )
            made.replace(target)
        logger.info("compiled the C kernels into %s", target)
    return target


def extra_flags() -> tuple[str, ...]:
    """For the instructions that this processor has."""
    text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    there = set(next((x for x in text.splitlines() if x.startswith("flags")), "").split())
    return tuple(flag for name, flag in _EXTRA_FLAGS.items() if name in there)


def every_extra_flags() -> tuple[tuple[str, ...], ...]:
    """What `extra_flags` can say on any processor."""
    flags = tuple(_EXTRA_FLAGS.values())
    return tuple(some for n in range(len(flags) + 1) for some in combinations(flags, n))


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

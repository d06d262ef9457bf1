"""Describes the origin of a kept result: the machine, the commit, the moment."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import psutil

ROOT = Path(__file__).resolve().parents[2]


def environment() -> dict[str, object]:
    """The machine, the commit and the moment."""
    return {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_commit": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "cpu": _cpu_name(),
        "num_cpus": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def write_json(path: Path, result: object) -> None:
    """Save a result: a Struct, or what JSON knows; paths and the like in it become text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    encoded = msgspec.json.encode(result, enc_hook=str)
    path.write_bytes(msgspec.json.format(encoded, indent=2) + b"\n")

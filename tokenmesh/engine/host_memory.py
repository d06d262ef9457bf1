"""Tell how much memory the host has left. Apart from the device's, which needs torch."""

from pathlib import Path
from typing import Final

from tokenmesh.shared.errors import ConfigError

_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/sys/fs/cgroup")


def available_host_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Host memory that can be had without swapping, within the bound of a container if there is
    one. Raises ConfigError."""
    available = _meminfo_available(meminfo)
    try:
        bound = (cgroup / "memory.max").read_text(encoding="ascii").strip()
        used = int((cgroup / "memory.current").read_text(encoding="ascii"))
        stat = (cgroup / "memory.stat").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return available
    if not bound.isdigit():
        return available
    # pages of files that were read: the kernel drops them when the container needs memory
    cached = int(dict(zip(stat[::2], stat[1::2], strict=True)).get("inactive_file", "0"))
    return max(0, min(available, int(bound) - used + cached))


def _meminfo_available(meminfo: Path) -> int:
    for line in meminfo.read_text(encoding="ascii").splitlines():
        key, _, value = line.partition(":")
        if key == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise ConfigError(f"{meminfo} does not state how much memory is available")

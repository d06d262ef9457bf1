"""Memory of the processes of a mesh over time."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

import psutil

_MIB = 1024 * 1024
_NAMES = ("tokenmesh", "nats-server", "redis-server", "valkey-server")


@dataclass(slots=True)
class Trail:
    """One process: resident memory and the CPU it used."""

    pid: int
    name: str
    times_s: list[float] = field(default_factory=list)
    rss_mib: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def slope_kib_s(self) -> float:
        """Least squares over all samples."""
        mean_s, mean_mib = fmean(self.times_s), fmean(self.rss_mib)
        spread = sum((at - mean_s) ** 2 for at in self.times_s)
        if spread == 0:
            return 0.0
        shared = sum(
            (at - mean_s) * (mib - mean_mib)
            for at, mib in zip(self.times_s, self.rss_mib, strict=True)
        )
        return 1024 * shared / spread

    def growth_mib(self) -> float:
        """Median of the last quarter less that of the first."""
        quarter = max(1, len(self.rss_mib) // 4)
        return median(self.rss_mib[-quarter:]) - median(self.rss_mib[:quarter])

    def cpu_share(self) -> float:
        """Cores in use on average."""
        elapsed_s = self.times_s[-1] - self.times_s[0]
        return (self.cpu_s[-1] - self.cpu_s[0]) / elapsed_s if elapsed_s else 0.0


def mesh_processes(port: int) -> list[psutil.Process]:
    """The services and servers of the mesh whose gateway listens on `port` of this machine.

    What a service starts and ends as it likes is left out. Raises ValueError when none is running.
    """
    listening = (
        each.pid
        for each in psutil.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port
    )
    pid = next((each for each in listening if each is not None), None)
    if pid is None:
        raise ValueError(f"no process of this machine listens on port {port}")
    top = _top(psutil.Process(pid))
    return [top, *(child for child in top.children(recursive=True) if _title(child))]


def _top(process: psutil.Process) -> psutil.Process:
    """`tokenmesh up`, or the gateway itself where it was started alone."""
    parent = process.parent()
    return _top(parent) if parent is not None and _title(parent) else process


def _title(process: psutil.Process) -> str:
    return title_of(process.cmdline())


def title_of(command: Sequence[str]) -> str:
    """`tokenmesh serve worker`, `nats-server`, ...; empty for strangers."""
    # A server that sets its title has all of it in the first word.
    words = " ".join(command).split()
    for index, word in enumerate(words):
        name = word.rpartition("/")[2]
        if name in _NAMES:
            # Plain words only: paths and flags differ from run to run.
            return " ".join([name, *filter(str.isalpha, words[index + 1 : index + 3])])
    return ""


class MemoryWatch:
    """Samples processes once a second."""

    def __init__(self, processes: Sequence[psutil.Process], interval_s: float = 1.0) -> None:
        self._processes = processes
        self._interval_s = interval_s
        self.trails = [Trail(each.pid, _title(each) or each.name()) for each in processes]

    async def run(self, from_s: float, to_s: float) -> None:
        """Sample between two moments from now. Raises psutil.NoSuchProcess when one is gone."""
        began_s = time.perf_counter()
        await asyncio.sleep(from_s)
        while time.perf_counter() - began_s < to_s:
            self.sample()
            await asyncio.sleep(self._interval_s)

    def sample(self) -> None:
        """One sample of each."""
        now = time.perf_counter()
        for process, trail in zip(self._processes, self.trails, strict=True):
            with process.oneshot():
                cpu = process.cpu_times()
                trail.times_s.append(now)
                trail.rss_mib.append(process.memory_info().rss / _MIB)
                trail.cpu_s.append(cpu.user + cpu.system)

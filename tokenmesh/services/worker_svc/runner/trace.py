"""TorchTrace: torch's profiler over every thread of the worker."""

from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile


class TorchTrace:
    """Implements `profiling.Trace`. The steps run on threads of their own, so all are recorded."""

    def __init__(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(
            activities=activities,
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        )

    def start(self) -> None:
        """See `Trace.start`."""
        self._profile.start()

    def write(self, path: Path) -> None:
        """See `Trace.write`: Chrome's format, gzip for a path that ends in .gz."""
        self._profile.stop()
        self._profile.export_chrome_trace(str(path))

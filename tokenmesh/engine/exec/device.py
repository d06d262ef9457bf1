"""Where a worker computes."""

import logging
from pathlib import Path
from typing import Final

import torch

from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import ConfigError

logger = logging.getLogger(__name__)

_DRIVER: Final = Path("/dev/nvidiactl")
"""Where there is one, there is an NVIDIA driver with a GPU to drive."""
_OLDEST: Final = (8, 0)
"""Compute capability of the first GPUs with bfloat16: Ampere."""


def device_of(settings: WorkerSettings, driver: Path = _DRIVER) -> torch.device:
    """Return what the settings say.

    Raises ConfigError for a GPU that is not there or not to be used.
    """
    if settings.device == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return _gpu()
    reason = (
        f"torch {torch.__version__} is built without CUDA"
        if torch.version.cuda is None
        else f"torch {torch.__version__} for CUDA {torch.version.cuda} finds no driver that is new "
        "enough, or CUDA_VISIBLE_DEVICES hides all GPUs"
    )
    if settings.device == "cuda":
        raise ConfigError(f"device is cuda and torch finds no GPU: {reason}", param="worker.device")
    if driver.exists():
        logger.warning("there is an NVIDIA driver, but the model runs on the CPU: %s", reason)
    return torch.device("cpu")


def _gpu() -> torch.device:
    try:
        device = torch.device("cuda", torch.cuda.current_device())
        name = torch.cuda.get_device_name(device)
        capability = torch.cuda.get_device_capability(device)
    # held exclusively by another process, or a driver and libraries that do not match
    except RuntimeError as error:
        raise ConfigError(f"the GPU cannot be used: {error}", param="worker.device") from error
    if torch.version.hip is not None or capability < _OLDEST:
        raise ConfigError(
            f"{name} cannot run the kernels, which are for NVIDIA GPUs of compute capability "
            f"{_OLDEST[0]}.{_OLDEST[1]} and above; set worker.device to cpu",
            param="worker.device",
        )
    logger.info("the model runs on %s", name)
    return device

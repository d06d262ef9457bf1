"""device_of: where a worker computes."""

import torch

from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import ConfigError


def device_of(settings: WorkerSettings) -> torch.device:
    """What the settings say. Raises ConfigError for a GPU that is not there."""
    has_gpu = settings.device != "cpu" and torch.cuda.is_available()
    if settings.device == "cuda" and not has_gpu:
        raise ConfigError("device is cuda and torch finds no GPU", param="worker.device")
    return torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")

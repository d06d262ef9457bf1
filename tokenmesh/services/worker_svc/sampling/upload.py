"""upload: values of the host on their way to a device, without waiting for it."""

import torch


def upload(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same values on `device`, for what is launched there from now on.

    They go through pinned memory: a copy from any other waits for all that was launched before it.
    """
    if device.type == "cpu":
        return values
    # torch keeps pinned memory from others until the copies that were launched on it are done
    return values.pin_memory().to(device, non_blocking=True)

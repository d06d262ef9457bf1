"""Values of the host on a device."""

import torch


def upload(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same values on `device`, for what is launched there from now on.

    They go through pinned memory: a copy from other memory waits for all earlier launches.
    """
    if device.type == "cpu":
        return values
    # torch does not reuse pinned memory before the copies launched on it are done
    return values.pin_memory().to(device, non_blocking=True)

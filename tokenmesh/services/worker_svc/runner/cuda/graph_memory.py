"""What graphs cost beside tensors: the driver keeps every recorded launch in device memory."""

from collections.abc import Callable

from tokenmesh.services.worker_svc.runner.device_memory import DeviceMemory


def driver_bytes(memory: DeviceMemory, record: Callable[[], int], num_graphs: int) -> int:
    """Bytes that `num_graphs` will take, from what those take that `record` makes now.

    `record` returns how many it made. All graphs hold the same launches but for their sizes.
    """
    before = memory.free() + memory.reserved()
    made = record()
    taken = before - memory.free() - memory.reserved()
    return max(0, taken) * num_graphs // max(1, made)

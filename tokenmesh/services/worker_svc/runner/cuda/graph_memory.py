"""What graphs cost beside the tensors that are alive while nothing is computed."""

from collections.abc import Callable

from tokenmesh.services.worker_svc.runner.device_memory import DeviceMemory


def graph_bytes(memory: DeviceMemory, record: Callable[[], int], num_graphs: int) -> int:
    """Bytes that `num_graphs` will take, from what those take that `record` makes now.

    `record` returns how many it made, of the largest size. The driver keeps every recorded launch
    in device memory, and all graphs hold the same launches but for their sizes. What recorded
    launches compute in is kept for replays, free though it looks, and serves the smaller ones too.
    """
    memory.release()
    before, idle = memory.free() + memory.reserved(), _idle(memory)
    made = record()
    memory.release()
    driver = before - memory.free() - memory.reserved()
    return max(0, driver) * num_graphs // max(1, made) + max(0, _idle(memory) - idle)


def _idle(memory: DeviceMemory) -> int:
    """What the allocator holds for nobody and does not give back."""
    return memory.reserved() - memory.allocated()

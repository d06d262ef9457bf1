"""The limits of a process that decodes files: the kernel enforces them for any file."""

import resource


def confine(memory_bytes: int) -> None:
    """No memory beyond this address space, no files, connections or further processes."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    for limit in (
        resource.RLIMIT_FSIZE,
        resource.RLIMIT_CORE,
        resource.RLIMIT_NOFILE,
        resource.RLIMIT_NPROC,
    ):
        resource.setrlimit(limit, (0, 0))

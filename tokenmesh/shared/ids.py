"""Identifiers: their types and how they are made. Nobody else calls uuid, secrets or random."""

import secrets
from typing import Final, NewType

RequestId = NewType("RequestId", str)
"""What a user sees and can trace: `chatcmpl-...`, `cmpl-...` or the client's own."""

WorkerId = NewType("WorkerId", str)
GatewayId = NewType("GatewayId", str)
InstanceId = NewType("InstanceId", str)
"""Any process of the mesh; a worker's or gateway's id is also its instance id."""

ModelName = NewType("ModelName", str)
"""The name a client asks for (one of the served model names)."""

BlobKey = NewType("BlobKey", str)

SEED_BITS: Final = 63


def new_request_id(prefix: str) -> RequestId:
    """A fresh id such as `chatcmpl-5f0c...` (128 random bits, hexadecimal)."""
    return RequestId(f"{prefix}-{secrets.token_hex(16)}")


def new_instance_id(service: str) -> InstanceId:
    """A fresh process id such as `worker-1f3a5c7e`; holds no dots, so it is one subject token."""
    return InstanceId(f"{service}-{secrets.token_hex(4)}")


def new_epoch() -> int:
    """A random 63-bit number drawn once per process start; fences an earlier incarnation."""
    return secrets.randbits(SEED_BITS)


def new_seed() -> int:
    """A sampling seed in [0, 2**63) for a request that brought none."""
    return secrets.randbits(SEED_BITS)

"""Identifiers: their types and how they are made. No other module uses uuid, secrets or random."""

import itertools
import os
import secrets
from typing import Final, NewType

import xxhash

RequestId = NewType("RequestId", str)
"""The id that a user sees and can trace: `chatcmpl-...`, `cmpl-...` or the client's own."""

ResponseId = NewType("ResponseId", str)
"""`resp_...`: holds no dots, so it is one subject token."""

WorkerId = NewType("WorkerId", str)
GatewayId = NewType("GatewayId", str)
InstanceId = NewType("InstanceId", str)
"""Any process of the mesh; a worker's or gateway's id is also its instance id."""

ModelName = NewType("ModelName", str)
"""The name in a client's request (one of the served model names)."""

BlobKey = NewType("BlobKey", str)

SEED_BITS: Final = 63


def new_request_id(prefix: str) -> RequestId:
    """A fresh id such as `chatcmpl-5f0c...` (128 random bits, hexadecimal)."""
    return RequestId(f"{prefix}-{secrets.token_hex(16)}")


def new_response_id() -> ResponseId:
    """A fresh id such as `resp_5f0c...` (128 random bits, hexadecimal)."""
    return ResponseId(f"resp_{secrets.token_hex(16)}")


def new_instance_id(service: str) -> InstanceId:
    """A fresh process id such as `worker-1f3a5c7e`; holds no dots, so it is one subject token."""
    return InstanceId(f"{service}-{secrets.token_hex(4)}")


def new_epoch() -> int:
    """A random 63-bit number drawn at each start of a process."""
    return secrets.randbits(SEED_BITS)


def new_seed() -> int:
    """A sampling seed in [0, 2**63) for a request without one."""
    return secrets.randbits(SEED_BITS)


def new_trace_id() -> int:
    return secrets.randbits(128)


_span_ids = itertools.count(secrets.randbits(SEED_BITS))


def new_span_id() -> int:
    """Below 2**64; counted from a random start, which is faster than random bits for each."""
    return next(_span_ids)


def _count_anew() -> None:
    global _span_ids
    _span_ids = itertools.count(secrets.randbits(SEED_BITS))


# Services that `up` forks would count from where their common parent stood.
os.register_at_fork(after_in_child=_count_anew)


class SeedSource:
    """Seeds for requests without one; a fixed `seed` gives the same ones in the same order."""

    def __init__(self, seed: int | None) -> None:
        self._seed = seed
        self._counter = itertools.count()

    def draw(self) -> int:
        """The next seed in [0, 2**63)."""
        if self._seed is None:
            return new_seed()
        text = f"{self._seed}:{next(self._counter)}"
        return xxhash.xxh3_64_intdigest(text.encode()) >> (64 - SEED_BITS)


def new_reservation() -> str:
    """Names what one placement reserves."""
    return secrets.token_hex(8)


def new_turn() -> str:
    """Names a turn in which a process works on one request alone."""
    return secrets.token_hex(8)


def new_blob_key(prefix: str) -> BlobKey:
    """Return a key for a blob that is stored once, and not found by its content."""
    return BlobKey(f"{prefix}:{secrets.token_hex(16)}")


def new_token() -> bytes:
    """32 bytes that cannot be guessed."""
    return secrets.token_bytes(32)


def new_snapshot_id() -> str:
    """Names what one subscriber reads page by page."""
    return secrets.token_hex(8)

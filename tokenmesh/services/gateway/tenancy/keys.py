"""The keys of Redis that hold a tenant's counts; the braces keep them on one node of a cluster."""

from typing import Final

TENANTS_KEY: Final = "tm:tenants"
"""SET: names of all tenants that ever had a key here."""
ALL_TENANTS: Final = "*"
"""Stands for all tenants together in a key; no tenant can have this name."""


def state_key(tenant: str) -> str:
    """HASH: the levels of its buckets, and when they were so."""
    return f"tm:tenant:{{{tenant}}}:state"


def open_key(tenant: str) -> str:
    """ZSET: its requests that run, by when they are forgotten unless somebody renews them."""
    return f"tm:tenant:{{{tenant}}}:open"


def usage_key(tenant: str, month: str) -> str:
    """HASH: `tokens`, and `<kind>:<model>` for each kind and model."""
    return f"tm:tenant:{{{tenant}}}:usage:{month}"


def counted_key(tenant: str) -> str:
    """ZSET: responses that are in the counts, by when they were put there."""
    return f"tm:tenant:{{{tenant}}}:counted"


def expiry_key(tenant: str) -> str:
    """ZSET: all of its keys, by when they may be deleted."""
    return f"tm:tenant:{{{tenant}}}:expiry"


def uploads_key(tenant: str) -> str:
    """ZSET: its uploads, by when they expire."""
    return f"tm:tenant:{{{tenant}}}:uploads"


def upload_bytes_key(tenant: str) -> str:
    """HASH: bytes of each upload, and their sum under the empty name."""
    return f"tm:tenant:{{{tenant}}}:upload-bytes"


def sequence_key(tenant: str, writer: str) -> str:
    """STRING: number of the last batch of a gateway that is in the counts."""
    return f"tm:tenant:{{{tenant}}}:seq:{writer}"

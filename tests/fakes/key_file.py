"""Entries of a key file."""

import hashlib


def key_entry(key: str, tenant: str) -> str:
    """TOML that gives a tenant, described elsewhere in the file, a key."""
    digest = hashlib.sha256(key.encode()).hexdigest()
    return f'[[keys]]\nsha256 = "{digest}"\ntenant = "{tenant}"'

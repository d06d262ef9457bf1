"""--kv-transfer-config: vLLM's JSON for KV of other workers, as our settings."""

import json
from typing import Final

from tokenmesh.shared.errors import ConfigError

FLAG: Final = "--kv-transfer-config"

_ROLES: Final = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}
_LIBRARIES: Final = {"NixlConnector": "nixl", "MooncakeConnector": "mooncake"}
"""Connectors between workers, and the libraries that are used where both workers have them; TCP
elsewhere."""
_STORE: Final = "MooncakeStoreConnector"
_CONNECTORS: Final = (*_LIBRARIES, _STORE)
_OTHERS: Final = {
    "OffloadingConnector": "KV in host memory is --kv-offloading-size",
    "LMCacheConnectorV1": f"of stores there is {_STORE}, and a folder (worker.kv.disk_dir)",
    "LMCacheMPConnector": f"of stores there is {_STORE}, and a folder (worker.kv.disk_dir)",
    "MultiConnector": "name one; a folder (worker.kv.disk_dir) may be set as well",
    "P2pNcclConnector": "it moves KV between GPUs, where no KV is exchanged; on CPUs name one of "
    + ", ".join(_LIBRARIES),
}
_EXTRA: Final = "kv_connector_extra_config"
_MASTER: Final = "master_server_address"
_LENT: Final = "global_segment_size"
_KEYS: Final = ("kv_connector", "kv_role", "kv_load_failure_policy")


def transfer_config(text: str) -> dict[str, object]:
    """Translate that JSON to `worker.kv`. Raises ConfigError that names the key."""
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise ConfigError(f"{FLAG} = {text!r}: should be a JSON object", param=FLAG)
    connector = given.get("kv_connector")
    keys = (*_KEYS, _EXTRA) if connector == _STORE else _KEYS
    for key in given:
        if key not in keys:
            raise _error(f"{key} is not supported; of its keys there are {', '.join(keys)}")
    if connector not in _CONNECTORS:
        what = _OTHERS.get(str(connector), f"should be one of {', '.join(_CONNECTORS)}")
        raise _error(f"kv_connector is {connector!r}: {what}")
    role = _ROLES.get(str(given.get("kv_role")))
    if role is None:
        raise _error(f"kv_role is {given.get('kv_role')!r}: should be one of {', '.join(_ROLES)}")
    if connector == _STORE:
        found = _store_of(given, role)
    else:
        found = {"role": role, "transports": (_LIBRARIES[str(connector)], "tcp")}
    if "kv_load_failure_policy" in given:
        found["load_failure_policy"] = str(given["kv_load_failure_policy"])
    return found


def _store_of(given: dict[str, object], role: str) -> dict[str, object]:
    """Return the settings of a store; vLLM reads the same keys from a file."""
    if role != "both":
        raise _error(f"{_STORE} reads and writes: kv_role should be kv_both")
    extra = given.get(_EXTRA)
    if not isinstance(extra, dict) or _MASTER not in extra:
        raise _error(f"{_STORE} needs {_EXTRA} with {_MASTER}, an address and a port")
    for key in extra:
        if key not in (_MASTER, _LENT):
            raise _error(f"{_EXTRA}.{key} is not supported; there are {_MASTER} and {_LENT}")
    found: dict[str, object] = {"mooncake_master": str(extra[_MASTER])}
    lent = extra.get(_LENT)
    if lent is not None:
        if not isinstance(lent, int) or lent < 0:
            raise _error(f"{_EXTRA}.{_LENT} is {lent!r}: should be a number of bytes")
        found["mooncake_size"] = lent / (1 << 30)
    return found


def _error(what: str) -> ConfigError:
    return ConfigError(f"{FLAG}: {what}", param=FLAG)

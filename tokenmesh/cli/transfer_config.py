"""--kv-transfer-config: vLLM's JSON for KV of other workers, as our settings."""

import json
import logging
from typing import Final

from tokenmesh.shared.errors import ConfigError

logger = logging.getLogger(__name__)

FLAG: Final = "--kv-transfer-config"

_ROLES: Final = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}
_CONNECTORS: Final = ("NixlConnector", "MooncakeConnector", "P2pNcclConnector")
"""Those between workers, which are taken for their roles."""
_OTHERS: Final = {
    "OffloadingConnector": "KV in host memory is --kv-offloading-size",
    "LMCacheConnectorV1": "there are no stores of KV outside of workers",
    "LMCacheMPConnector": "there are no stores of KV outside of workers",
    "MooncakeStoreConnector": "there are no stores of KV outside of workers",
    "MultiConnector": "workers choose between shared memory and TCP themselves",
}
_LIBRARIES: Final = {"NixlConnector": "nixl", "MooncakeConnector": "mooncake"}
"""Used where both workers have them, and TCP elsewhere."""
_KEYS: Final = ("kv_connector", "kv_role", "kv_load_failure_policy")


def transfer_config(text: str) -> dict[str, object]:
    """Translate that JSON to `worker.kv`. Raises ConfigError that names the key."""
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise ConfigError(f"{FLAG} = {text!r}: should be a JSON object", param=FLAG)
    for key in given:
        if key not in _KEYS:
            raise ConfigError(
                f"{FLAG}: {key} is not supported; of its keys there are {', '.join(_KEYS)}",
                param=FLAG,
            )
    connector = given.get("kv_connector")
    if connector not in _CONNECTORS:
        what = _OTHERS.get(str(connector), f"should be one of {', '.join(_CONNECTORS)}")
        raise ConfigError(f"{FLAG}: kv_connector is {connector!r}: {what}", param=FLAG)
    role = _ROLES.get(str(given.get("kv_role")))
    if role is None:
        what = f"{FLAG}: kv_role is {given.get('kv_role')!r}: should be one of {', '.join(_ROLES)}"
        raise ConfigError(what, param=FLAG)
    found: dict[str, object] = {"role": role}
    if connector in _LIBRARIES:
        found["transports"] = (_LIBRARIES[str(connector)], "tcp")
    else:
        logger.warning("%s: KV goes by shared memory or TCP, not by %s", FLAG, connector)
    if "kv_load_failure_policy" in given:
        found["load_failure_policy"] = str(given["kv_load_failure_policy"])
    return found

"""--kv-transfer-config as vLLM takes it, and what it is not."""

import json
from typing import Any

import pytest

from tokenmesh.cli.transfer_config import transfer_config
from tokenmesh.shared.config.loader import load_settings
from tokenmesh.shared.errors import ConfigError

STORE = "MooncakeStoreConnector"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"kv_role": "kv_producer"}, {"role": "prefill"}),
        ({"kv_role": "kv_consumer"}, {"role": "decode"}),
        (
            {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"},
            {"role": "both", "load_failure_policy": "recompute"},
        ),
    ],
)
def test_roles_and_policy_become_settings(given: dict[str, Any], expected: dict[str, str]) -> None:
    found = transfer_config(json.dumps({"kv_connector": "NixlConnector", **given}))
    assert found == {**expected, "transports": ("nixl", "tcp")}
    kv = load_settings(None, {"worker": {"kv": found}}).worker.kv
    assert kv.used_transports == ("nixl", "tcp")
    assert (kv.role, kv.load_failure_policy) == (
        expected["role"],
        expected.get("load_failure_policy", "fail"),
    )


def test_mooncake_moves_kv_where_it_is_the_connector() -> None:
    found = transfer_config('{"kv_connector": "MooncakeConnector", "kv_role": "kv_both"}')
    assert found == {"role": "both", "transports": ("mooncake", "tcp")}


def test_mooncakes_store_keeps_kv_where_it_is_the_connector() -> None:
    extra = {"master_server_address": "10.0.0.7:50051", "global_segment_size": 1 << 31}
    text = json.dumps(
        {"kv_connector": STORE, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    )
    found = transfer_config(text)
    assert found == {"mooncake_master": "10.0.0.7:50051", "mooncake_size": 2.0}
    kv = load_settings(None, {"worker": {"kv": found}}).worker.kv
    assert (kv.role, kv.has_stores, kv.is_used) == (None, True, True)
    with pytest.raises(ConfigError, match="an address and a port"):
        load_settings(None, {"worker": {"kv": {"mooncake_master": "10.0.0.7"}}})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"kv_role": "kv_both", "kv_rank": 1}, "kv_rank is not supported"),
        ({"kv_role": "prefill"}, "kv_role is 'prefill'"),
        ({}, "kv_role is None"),
        ({"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}, "of stores there is"),
        ({"kv_connector": "P2pNcclConnector", "kv_role": "kv_both"}, "between GPUs"),
        ({"kv_connector": STORE, "kv_role": "kv_both"}, "needs kv_connector_extra_config"),
        ({"kv_connector": STORE, "kv_role": "kv_producer"}, "should be kv_both"),
        (
            {
                "kv_connector": STORE,
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"master_server_address": "h:1", "protocol": "rdma"},
            },
            "kv_connector_extra_config.protocol is not supported",
        ),
        ({"kv_connector": "Mine", "kv_role": "kv_both"}, "should be one of NixlConnector"),
    ],
)
def test_what_is_not_there_is_refused_by_name(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        transfer_config(json.dumps({"kv_connector": "NixlConnector", **given}))


def test_kv_in_the_clear_is_refused_where_the_bus_is_encrypted() -> None:
    for listen, transports, is_refused in (
        ("10.0.0.7:9400", ("shm", "tcp"), True),
        ("10.0.0.7:9400", ("nixl",), True),
        ("10.0.0.7:9400", ("shm",), False),
        ("127.0.0.1:0", ("shm", "tcp"), False),
        ("[::1]:0", ("tcp",), False),
    ):
        values = {"role": "both", "listen": listen, "transports": transports}
        kv = load_settings(None, {"worker": {"kv": values}}).worker.kv
        kv.check_encryption("nats://10.0.0.1:4222")
        if is_refused:
            with pytest.raises(ConfigError, match="there is no TLS"):
                kv.check_encryption("tls://10.0.0.1:4222")
        else:
            kv.check_encryption("tls://10.0.0.1:4222")


def test_other_text_is_named() -> None:
    with pytest.raises(ConfigError, match="should be a JSON object"):
        transfer_config("nixl")

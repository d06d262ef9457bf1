"""Keys, error shapes and the catalog's rules."""

import hashlib

import pytest
from pydantic import BaseModel, ValidationError

from tokenmesh.services.gateway.core.http.errors import error_body, field_path, invalid_fields
from tokenmesh.services.gateway.core.mesh.catalog import Catalog
from tokenmesh.services.gateway.core.tenancy.auth import KeyRing, key_of
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.errors import (
    InvalidInput,
    Overloaded,
    Unauthorized,
    Unavailable,
    UnknownModel,
)
from tokenmesh.shared.ids import InstanceId, ModelName
from tokenmesh.shared.membership import Members, MembershipView
from tokenmesh.shared.messages import Heartbeat
from tokenmesh.shared.messages.beat import ModelCard
from tokenmesh.shared.metrics import Metrics

HASH = hashlib.sha256(b"sk-1").hexdigest()


WRONG: list[dict[bytes, bytes]] = [
    {},
    {b"authorization": b""},
    {b"authorization": b"sk-1"},
    {b"authorization": b"Bearer"},
    {b"authorization": b"Bearer sk-2"},
    {b"authorization": b"Basic sk-1"},
    {b"x-api-key": b""},
    {b"x-api-key": b"Bearer sk-1"},
    {b"sec-websocket-protocol": b"realtime, sk-1"},
    {b"sec-websocket-protocol": b"realtime, openai-insecure-api-key."},
    # Only one key: a right one after a wrong one does not count.
    {b"authorization": b"Bearer sk-2", b"x-api-key": b"sk-1"},
]
RIGHT: list[dict[bytes, bytes]] = [
    {b"authorization": b"Bearer sk-1"},
    {b"authorization": b"bearer  sk-1 "},
    {b"x-api-key": b"sk-1"},
    {b"sec-websocket-protocol": b"realtime,openai-insecure-api-key.sk-1, other"},
]


def key_ring(hashes: list[str]) -> KeyRing:
    return KeyRing(GatewaySettings(api_key_hashes=tuple(hashes)), Metrics())


@pytest.mark.parametrize("headers", WRONG)
def test_a_wrong_or_missing_key_is_refused(headers: dict[bytes, bytes]) -> None:
    with pytest.raises(Unauthorized):
        key_ring([HASH]).access("/v1/models", key_of(headers))


@pytest.mark.parametrize("headers", RIGHT)
def test_the_right_key_is_accepted(headers: dict[bytes, bytes]) -> None:
    key_ring(["0" * 64, HASH]).access("/v1/models", key_of(headers))


def test_without_keys_every_request_is_accepted() -> None:
    key_ring([]).access("/v1/models", None)


@pytest.mark.parametrize("path", ["/health", "/livez", "/readyz"])
def test_health_needs_no_key(path: str) -> None:
    key_ring([HASH]).access(path, None)


def test_an_error_body_has_four_fields() -> None:
    body = error_body(Overloaded("full", retry_after_s=1))
    assert (body.error.type, body.error.code) == ("RateLimitError", "overloaded")


@pytest.mark.parametrize(
    ("location", "path"),
    [
        (("temperature",), "temperature"),
        (("messages", 0, "role"), "messages[0].role"),
        (("stop", "list[str]", 3), "stop[3]"),
        (("prompt", "list[constrained-int]", 0), "prompt[0]"),
        ((), ""),
    ],
)
def test_a_location_becomes_the_name_of_a_field(location: tuple[str | int, ...], path: str) -> None:
    assert field_path(location) == path


def test_all_wrong_fields_are_named() -> None:
    class Body(BaseModel):
        a: int
        b: int

    with pytest.raises(ValidationError) as caught:
        Body.model_validate_json('{"a": "x"}')
    error = invalid_fields(caught.value)
    assert error.param == "a"
    assert "b is missing" in error.message


def catalog(
    *names: str,
    aliases: dict[str, str] | None = None,
    splits: dict[str, dict[str, float]] | None = None,
) -> Catalog:
    view = MembershipView(4, 10)
    for index, name in enumerate(names):
        card = ModelCard(
            name=ModelName(name),
            aliases=[ModelName(f"{name}-latest")],
            max_model_len=8,
            vocab_size=9,
        )
        view.observe(
            Heartbeat(
                service="worker",
                instance_id=InstanceId(f"worker-{index}"),
                epoch=1,
                sequence=1,
                version="0",
                models=[card],
            ),
            monotonic_s(),
        )
    settings = Settings(
        models=(ModelSettings(model="/models/slow", served_model_name=("slow",)),),
        gateway=GatewaySettings(model_aliases=aliases or {}, model_splits=splits or {}),
    )
    return Catalog(Members(view), settings)


def test_a_model_has_several_names() -> None:
    found = catalog("m", aliases={"gpt-4o": "m"})
    assert {found.find(name).name for name in ("m", "m-latest", "gpt-4o")} == {"m"}
    assert found.names(found.find("m")) == ["m", "m-latest", "gpt-4o"]


def test_a_name_of_several_models_is_one_of_those_that_are_served() -> None:
    splits = {"chat": {"v1": 3.0, "v2-latest": 1.0, "v3": 9.0}}
    found = catalog("v1", "v2", splits=splits)
    names = [found.find("chat", f"chatcmpl-{number}").name for number in range(200)]
    assert set(names) == {"v1", "v2"}
    assert names == [found.find("chat", f"chatcmpl-{number}").name for number in range(200)]
    assert [(name, card.name) for name, card in found.splits()] == [("chat", "v1")]
    with pytest.raises(Unavailable):
        catalog("other", splits=splits).find("chat", "r")


def test_the_only_model_needs_no_name() -> None:
    assert catalog("m").find(None).name == "m"
    with pytest.raises(InvalidInput, match="a, b"):
        catalog("a", "b").find(None)
    with pytest.raises(Unavailable):
        catalog().find(None)


def test_a_configured_model_without_a_worker_is_not_up_yet() -> None:
    with pytest.raises(Unavailable):
        catalog("m").find("slow")
    with pytest.raises(UnknownModel):
        catalog("m").find("nothing")

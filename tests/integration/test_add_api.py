"""An API is one package and one line in the table: nothing else of the gateway knows it."""

import re
import secrets
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from tests.fakes.back_end import BackEnd
from tests.fakes.key_file import key_entry
from tests.fakes.shout_api import PATH, SHOUT, WORDS
from tokenmesh.services import gateway
from tokenmesh.services.gateway.apis.table import APIS
from tokenmesh.services.gateway.core.api_table import ApiTable
from tokenmesh.services.gateway.core.gateway_core import Core
from tokenmesh.services.gateway.gateway import Gateway
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.metrics import Metrics

ROOT = Path(str(gateway.__file__)).parent
MAX_ATTRIBUTES = 16


@pytest.fixture
async def mesh(
    bus_settings: BusSettings, redis_settings: RedisSettings, tmp_path: Path
) -> AsyncIterator[BackEnd]:
    mark, path = secrets.token_hex(4), tmp_path / "keys.toml"
    entries = [f"[tenants.one-{mark}]\nrequests_per_minute = 3", key_entry("sk-one", f"one-{mark}")]
    path.write_text("\n".join(entries))
    mesh = BackEnd(bus_settings, redis_settings, keys_file=path)
    mesh.apis = (*APIS, SHOUT)
    async with mesh:
        yield mesh


@pytest.fixture
async def client(mesh: BackEnd) -> AsyncIterator[httpx.AsyncClient]:
    key = {"authorization": "Bearer sk-one"}
    async with httpx.AsyncClient(base_url=mesh.url, headers=key, timeout=10) as http:
        yield http


async def test_a_new_api_answers_fails_and_exempts_in_its_own_way(
    client: httpx.AsyncClient,
) -> None:
    said = await client.post(PATH, json={"say": "Hi"})
    assert said.status_code == 200, said.text
    assert said.json()["shout"] == "HELLO FROM THE MESH, NA\u00cfVE CAF\u00c9!!"
    # The id begins as the API says, also that of the request.
    assert said.json()["id"].startswith("shout-")
    assert said.headers["x-request-id"] == said.json()["id"]
    streamed = await client.post(PATH, json={"say": "Hi", "stream": True})
    assert streamed.text == "HELLO FROM THE MESH, NA\u00cfVE CAF\u00c9!!\n"
    # Fields of the chat that it became have the client's names.
    wrong = await client.post(PATH, json={"say": "Hi", "words": -1})
    assert wrong.status_code == 400
    assert set(wrong.json()) == {"problem", "field", "request"}
    assert wrong.json()["field"] == "words"
    # Also what is refused before it reaches the route, or has none.
    over = await client.post(PATH, json={"say": "Hi"})
    assert (over.status_code, over.json()["field"]) == (429, None)
    assert over.headers["retry-after"]
    missing = await client.get("/shout/v2", headers={"authorization": "Bearer wrong"})
    assert (missing.status_code, set(missing.json())) == (401, {"problem", "field", "request"})
    # A path that the API exempts is served over the limit.
    assert (await client.get(WORDS)).json() == {"words": ["hello"]}
    assert (await client.get("/shout/v2")).status_code == 429
    document = (await client.get("/openapi.json")).json()
    operation = document["paths"][PATH]["post"]
    schema = {"$ref": "#/components/schemas/fakes.Said"}
    assert operation["responses"]["200"]["content"]["application/json"]["schema"] == schema
    assert "SayRequest" in document["components"]["schemas"]


def test_the_gateway_and_its_core_have_few_attributes(mesh: BackEnd) -> None:
    assert len(vars(mesh.gateway)) <= MAX_ATTRIBUTES, vars(mesh.gateway)
    assert len(vars(mesh.gateway.core)) <= MAX_ATTRIBUTES, vars(mesh.gateway.core)
    assert isinstance(mesh.gateway, Gateway)
    assert isinstance(mesh.gateway.core, Core)


def test_two_apis_cannot_have_one_path(mesh: BackEnd) -> None:
    with pytest.raises(AssertionError, match=PATH):
        ApiTable((SHOUT, SHOUT))
    silent = replace(SHOUT, answer_kinds={})
    core = mesh.gateway.core
    parts = (core.id, core.bus, core.uploads.blobs, core.members, core.config)
    with pytest.raises(AssertionError, match="shout has paths of other APIs"):
        Gateway(*parts, metrics=Metrics(), apis=(silent, silent))


PARTS = (
    *("gateway.py", "app.py", "edge.py", "main.py"),
    *("core/errors.py", "core/admitted.py", "core/api.py", "core/api_table.py"),
    "core/gateway_core.py",
)
WORDS_OF_ALL = {"audio", "batches", "files", "operator", "pooling", "responses"}
"""Names of APIs that are also words for what every API has."""
NAMES = "|".join(api.name for api in APIS if api.name not in WORDS_OF_ALL)
NAMED = re.compile(
    rf"\b({NAMES})|/(v1|v2|api|inference)/|services\.gateway\.apis\.(?!table)", re.IGNORECASE
)
"""An API, a path of one, or its package."""
ID_PREFIXES = {kind.id_prefix for api in APIS for kind in api.answer_kinds.values()}


@pytest.mark.parametrize("part", PARTS)
def test_the_centre_names_no_api(part: str) -> None:
    lines = (ROOT / part).read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if NAMED.search(line)] == []
    assert [prefix for prefix in ID_PREFIXES if f'"{prefix}"' in "".join(lines)] == []

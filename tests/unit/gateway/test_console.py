"""The console: its built files, what they may do in a browser, and the numbers that it shows."""

import asyncio
import os
import re
import shutil
import subprocess
from hashlib import sha256
from pathlib import Path

import pytest
from starlette.requests import Request

from tokenmesh.services.gateway.core.context import RequestContext
from tokenmesh.services.gateway.core.operations.console import pages
from tokenmesh.services.gateway.core.operations.console.pages import Page, asset_response
from tokenmesh.services.gateway.core.operations.console.shapes import TokenRates
from tokenmesh.services.gateway.core.operations.open_requests import WINDOW_S, OpenRequests
from tokenmesh.services.gateway.core.tenancy.auth import OPEN_PATHS
from tokenmesh.services.gateway.core.tenancy.tenant import DEFAULT_ACCESS
from tokenmesh.shared.errors import NotFound
from tokenmesh.shared.ids import InstanceId, RequestId
from tokenmesh.shared.membership import Member
from tokenmesh.shared.messages import Heartbeat
from tokenmesh.shared.messages.beat import WorkerLoad
from tokenmesh.shared.metrics import Metrics

SOURCES = Path(__file__).resolve().parents[3] / "console"
BUILT = Path(pages.__file__).parent / "built"
NOT_BUILT = {"test", "node_modules", "screenshots", "tsconfig.json", ".gitignore"}


def text_of(name: str) -> str:
    return (BUILT / name).read_text("utf-8")


def test_the_built_files_are_those_of_the_sources() -> None:
    """Needs no node: the build records the hashes of its sources. `make console` builds again."""
    recorded = dict(line.split("  ")[::-1] for line in text_of("sources.sha256").splitlines())
    files = [path for path in SOURCES.rglob("*") if path.is_file()]
    names = {path.relative_to(SOURCES) for path in files}
    names = {name for name in names if name.parts[0] not in NOT_BUILT}
    found = {str(name): sha256((SOURCES / name).read_bytes()).hexdigest() for name in names}
    assert found == recorded


@pytest.mark.timeout(90)
def test_a_fresh_build_gives_the_same_files(tmp_path: Path) -> None:
    node, vite = shutil.which("node"), SOURCES / "node_modules/vite/bin/vite.js"
    if node is None or not vite.exists():
        pytest.skip("needs node and console/node_modules, which make test-console installs")
    environment = {**os.environ, "CONSOLE_OUT": str(tmp_path)}
    subprocess.run([node, vite, "build"], cwd=SOURCES, env=environment, check=True, timeout=60)
    fresh = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert fresh == {path.name: path.read_bytes() for path in BUILT.iterdir()}


def test_the_page_loads_its_own_files_only() -> None:
    page = text_of("index.html")
    linked = set(re.findall(r'(?:src|href)="([^"]*)"', page))
    assert linked == {"console/app.js", "console/app.css", "console/icon.svg"}
    assert not re.search(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son\w+=", page)
    assert "url(" not in text_of("app.css")
    assert "@import" not in text_of("app.css")
    namespaces = {"http://www.w3.org/2000/svg", "http://www.w3.org/1998/Math/MathML"}
    addresses = set(re.findall(r"https?://[\w./-]+", text_of("app.js")))
    assert addresses <= {*namespaces, "http://www.w3.org/1999/xhtml"}


def test_the_sources_insert_text_only() -> None:
    for path in [*SOURCES.glob("src/*.ts"), *SOURCES.glob("src/*.tsx")]:
        text = path.read_text("utf-8")
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert way not in text, path
        assert "localStorage.setItem(KEY" not in text


def request(**headers: str) -> Request:
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": "GET", "path": "/", "headers": encoded})


@pytest.mark.parametrize("name", ["index.html", "app.js", "app.css", "icon.svg"])
def test_files_are_sent_with_a_strict_policy_and_only_when_they_changed(name: str) -> None:
    response = asset_response(name, request())
    assert response.body == (BUILT / name).read_bytes()
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'; script-src 'self'; style-src 'self';" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["x-frame-options"] == "DENY"
    again = asset_response(name, request(**{"if-none-match": response.headers["etag"]}))
    assert (again.status_code, again.body) == (304, b"")
    assert name == "index.html" or f"/console/{name}" in OPEN_PATHS


@pytest.mark.parametrize("name", ["sources.sha256", "../pages.py", "nothing"])
def test_other_files_are_not_sent(name: str) -> None:
    with pytest.raises(NotFound):
        asset_response(name, request())


def begun(requests: OpenRequests, status: int = 0, path: str = "/v1/completions") -> RequestContext:
    context = RequestContext(RequestId("r"), False, 0.0, method="POST", path=path, status=status)
    requests.begin(context)
    return context


def test_requests_are_counted_by_their_outcome_for_a_minute() -> None:
    requests = OpenRequests(Metrics())
    for second, status in ((1000.2, 200), (1000.9, 503), (1001.0, 429), (1030.0, 200)):
        requests.end(begun(requests, status), second)
    still = begun(requests)
    assert requests.num_open == 1
    found = requests.outcomes(1030.0)
    assert (found.requests, found.errors, found.refused) == (4, 1, 1)
    assert requests.outcomes(1000.0 + WINDOW_S).requests == 2
    assert requests.outcomes(1001.0 + WINDOW_S).requests == 1
    requests.end(still, 1000.0 + 5 * WINDOW_S)
    assert requests.outcomes(1000.0 + 5 * WINDOW_S).requests == 1


def test_the_newest_request_is_first_while_others_end() -> None:
    requests = OpenRequests(Metrics())
    first = begun(requests, path="/a")
    begun(requests, path="/b")
    listed = requests.newest_first()
    assert next(listed).path == "/b"
    requests.end(first)
    assert next(listed).path == "/a"


def worker(epoch: int, decoded: int, computed: int = 0, cached: int = 0) -> Member:
    load = WorkerLoad(decode_tokens=decoded, prefill_tokens=computed, cached_tokens=cached)
    beat = Heartbeat(
        service="worker",
        instance_id=InstanceId("worker-1"),
        epoch=epoch,
        sequence=1,
        version="0",
        load=load,
    )
    return Member(beat, 0.0)


async def test_rates_are_of_the_last_seconds_and_survive_a_restart() -> None:
    rates = TokenRates()
    await rates.sample([worker(1, 1000, 50, 7)], 0.0)
    assert rates.per_second() is None
    await rates.sample([worker(1, 1100, 60, 11)], 2.0)
    assert rates.per_second() == (50.0, 5.0, 2.0)
    await rates.sample([worker(2, 4)], 3.0)
    await rates.sample([worker(2, 104)], 4.0)
    assert rates.per_second() == (50.0, 2.5, 1.0)
    await rates.sample([worker(2, 104)], 20.0)
    assert rates.per_second() is None


async def test_a_slow_page_gets_the_newest_message_and_none_twice() -> None:
    page = Page(DEFAULT_ACCESS)
    for number in range(100):
        page.put(b"%d" % number)
    assert await page.next(1.0) == b"99"
    page.put(b"99")
    assert await page.next(0.01) is None
    waiting = asyncio.create_task(page.next(1.0))
    await asyncio.sleep(0)
    page.close()
    assert await waiting is None

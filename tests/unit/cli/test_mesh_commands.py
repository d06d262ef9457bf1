"""`tokenmesh top` and `tokenmesh drain` against a gateway that is not there."""

import io
import json
from collections.abc import Callable

import httpx
import pytest
from rich.console import Console

from tokenmesh.cli import drain as drain_module
from tokenmesh.cli import top as top_module
from tokenmesh.cli.api import GatewayClient
from tokenmesh.cli.main import INTERRUPTED, MISUSE, run
from tokenmesh.cli.top import draw_mesh

LOAD = {
    "running": 3, "waiting": 2, "max_num_seqs": 256, "queued_tokens": 77, "kv_blocks_used": 1,
    "kv_blocks_total": 4, "prefill_tokens_per_s": 8000.4, "step_s": 0.0123, "sleep_level": 0,
    "preemptions": 5, "prefill_tokens": 100, "decode_tokens": 9, "cached_tokens": 300,
}  # fmt: skip


def process(name: str, **more: object) -> dict[str, object]:
    plain = {
        "id": name, "service": name.partition("-")[0], "version": "0.1.0", "protocol": 1,
        "epoch": "1", "draining": False, "queued": 0, "models": [], "load": None,
    }  # fmt: skip
    return {**plain, **more}


STATE = {
    "protocol": 1,
    "processes": [
        process("gateway-1"),
        process("scheduler-1", queued=41),
        process("worker-1", models=["llama"], load=LOAD),
        process("worker-2", models=["llama"], load=LOAD | {"sleep_level": 1}),
        process("worker-3", models=["llama"], draining=True, ranks=6, stages=2),
    ],
    "other_protocols": [process("worker-x", protocol=2)],
}


def words_of(text: str, name: str) -> list[str]:
    """All that stands behind a name."""
    return [
        word for line in text.splitlines() if line.startswith(f"{name} ") for word in line.split()
    ]


def test_the_table_says_what_an_operator_looks_for() -> None:
    out = io.StringIO()
    Console(file=out, width=200).print(draw_mesh(STATE))
    shown = out.getvalue()
    worker = words_of(shown, "worker-1")
    for cell in ("llama", "up", "3/256", "2", "25%", "77", "8000", "12.3", "5", "75%", "0.1.0"):
        assert cell in worker
    assert "role" not in shown
    assert "asleep" in words_of(shown, "worker-2")
    assert {"draining", "tp3", "pp2"} <= {*words_of(shown, "worker-3")}
    assert "tp" not in shown.replace("tp3", "")
    assert "41" in words_of(shown, "scheduler-1")
    assert "worker-x uses protocol 2" in shown


def test_roles_leases_and_tiers_are_shown_where_kv_is_elsewhere() -> None:
    load = LOAD | {"kv_leases": 17}
    worker = process(
        "worker-1", models=["llama"], load=load, kv_role="prefill", kv_tiers=["host", "disk"]
    )
    out = io.StringIO()
    Console(file=out, width=200).print(draw_mesh({**STATE, "processes": [worker]}))
    words = words_of(out.getvalue(), "worker-1")
    assert {"prefill", "17", "host,", "disk"} <= set(words)


Answer = Callable[[httpx.Request], httpx.Response]


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer], None]:
    def install(answer: Answer) -> None:
        def make(url: str, api_key: str | None) -> GatewayClient:
            return GatewayClient(url, api_key, httpx.MockTransport(answer))

        monkeypatch.setattr(drain_module, "GatewayClient", make)
        monkeypatch.setattr(top_module, "GatewayClient", make)

    return install


def test_top_once_is_a_table_or_json(
    answered: Callable[[Answer], None], capsys: pytest.CaptureFixture[str]
) -> None:
    answered(lambda _: httpx.Response(200, json=STATE))
    assert run(["top", "--once"]) == 0
    assert "worker-1" in capsys.readouterr().out
    assert run(["top", "--once", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == STATE


def test_drain_waits_until_the_process_has_left(
    answered: Callable[[Answer], None], capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(f"{request.method} {request.url.path}")
        left = len(asked) > 3
        return httpx.Response(200, json=STATE | ({"processes": []} if left else {}))

    answered(answer)
    assert run(["drain", "worker-1"]) == 0
    assert asked == ["POST /mesh/worker-1/drain", *["GET /mesh"] * 3]
    assert "worker-1 has left" in capsys.readouterr().out


def test_drain_that_takes_too_long_has_its_exit_code(answered: Callable[[Answer], None]) -> None:
    answered(lambda _: httpx.Response(200, json=STATE))
    assert run(["drain", "worker-1", "--wait", "0.01"]) == drain_module.STILL_THERE
    assert run(["drain", "worker-1", "--wait", "0"]) == 0


def test_drain_of_the_only_gateway_ends_without_an_answer(
    answered: Callable[[Answer], None],
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            return httpx.Response(200, json={})
        raise httpx.ConnectError("refused", request=request)

    answered(answer)
    assert run(["drain", "gateway-1"]) == 0


def test_a_gateway_that_does_not_answer_says_nothing_of_another_process(
    answered: Callable[[Answer], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            return httpx.Response(200, json={})
        raise httpx.ReadTimeout("busy", request=request)

    answered(answer)
    assert run(["drain", "worker-1", "--wait", "0.01"]) == drain_module.STILL_THERE
    assert "left" not in capsys.readouterr().out


def test_top_outlives_a_gateway_that_is_away_for_a_while(
    answered: Callable[[Answer], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []
    out = io.StringIO()

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/metrics":
            return httpx.Response(401)
        looks.append(request)
        if len(looks) == 2:
            raise httpx.ConnectError("refused", request=request)
        if len(looks) == 4:
            raise KeyboardInterrupt
        return httpx.Response(200, json=STATE)

    def console(**options: bool) -> Console:
        return Console(file=out, width=200, force_terminal=True, **options)  # type: ignore[arg-type]

    answered(answer)
    monkeypatch.setattr(top_module, "Console", console)
    assert run(["top", "--interval", "0.1"]) == INTERRUPTED
    shown = out.getvalue()
    assert shown.index("worker-1") < shown.index("no gateway answers") < shown.rindex("worker-1")


def test_drain_without_a_name_is_misuse(
    answered: Callable[[Answer], None], capsys: pytest.CaptureFixture[str]
) -> None:
    body = {"error": {"message": "no process 'x' in the mesh"}}
    answered(lambda _: httpx.Response(404, json=body))
    assert run(["drain", "x"]) == MISUSE
    assert "no process 'x'" in capsys.readouterr().err

"""The chaos program's accounts: any difference between counted and reported usage shows."""

from collections import Counter
from typing import Any

import pytest

from benchmarks.chaos_run.accounts import differences_of, reported
from benchmarks.chaos_run.received import ReceivedResponse
from tests.fakes.scripted_http import plain, serving

RIGHT = {"requests": 2, "prompt_tokens": 30, "cached_tokens": 4, "completion_tokens": 50}


def usage(**changes: int) -> dict[str, Any]:
    return {
        "tenant": "amber",
        "month": "2026-11",
        "total_tokens": 80,
        "monthly_tokens": None,
        "tokens_left": None,
        "models": [{"model": "m", **RIGHT, **changes}],
    }


async def differences(own: dict[str, Any], admins: dict[str, Any]) -> list[str]:
    def answer(path: str, _body: dict[str, object]) -> bytes:
        return plain(200, {"data": [admins]} if path.endswith("/tenants") else own)

    async with serving(answer) as url:
        return await differences_of([url, url], "m", {"amber": Counter(RIGHT)})


async def test_equal_accounts_have_no_differences() -> None:
    assert await differences(usage(), usage()) == []


@pytest.mark.parametrize("kind", RIGHT)
@pytest.mark.parametrize("more", [-1, 1])
async def test_one_token_more_or_less_is_a_difference(kind: str, more: int) -> None:
    wrong = usage(**{kind: RIGHT[kind] + more})
    (found,) = await differences(wrong, wrong)
    assert f"{RIGHT[kind] + more} {kind} counted, {RIGHT[kind]} reported" in found


async def test_an_admin_must_see_the_same() -> None:
    (found,) = await differences(usage(), usage(requests=3))
    assert "an admin sees" in found


async def test_a_model_without_a_request_is_a_difference() -> None:
    strange = usage()
    strange["models"].append({"model": "other", **RIGHT})
    assert "amber: usage of other" in await differences(strange, strange)


def test_what_clients_received_is_summed_by_tenant() -> None:
    received = [ReceivedResponse(0.0, tenant="amber", usage=Counter(RIGHT)) for _ in range(2)]
    received.append(ReceivedResponse(0.0, tenant="birch"))
    assert reported(received) == {"amber": Counter(RIGHT) + Counter(RIGHT)}

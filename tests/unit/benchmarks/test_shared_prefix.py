"""The shared-prefix scenario: what is asked, and its gates."""

from typing import Any

from benchmarks.replay_run.prompts import Prompts
from benchmarks.replay_run.trace import most_cached
from benchmarks.shared_prefix import (
    OURS,
    PREFIXES,
    SLOWED,
    failures,
    make_entries,
    settings_of,
    warm_up,
)


def runs(**slowed: Any) -> dict[str, dict[str, Any]]:
    usual = {"hit_rate": 0.66, "ttft_p99": 0.2, "shares": [0.25] * 4, "errors": {}}
    return {OURS: usual, SLOWED: {**usual, "shares": [0.07, 0.31, 0.31, 0.31], **slowed}}


def test_requests_share_their_first_thousand_tokens_and_nothing_else() -> None:
    entries = make_entries(400, seed=0)
    assert entries == make_entries(400, seed=0)
    assert {len(Prompts(1536).ids(entry)) for entry in entries[:8]} == {1224}
    assert len({entry.hash_ids[0] for entry in entries}) == PREFIXES
    assert len({entry.hash_ids[2] for entry in entries}) == 400
    assert 0.65 < most_cached(entries) < 0.75
    assert most_cached(warm_up(16)) == 0.0


def test_the_kv_holds_what_the_scenario_says() -> None:
    worker = settings_of(OURS).worker
    assert ((worker.num_gpu_blocks_override or 0) - 1) * worker.block_size == 24_000


def test_every_gate_can_be_missed() -> None:
    assert failures(runs(), 4.0) == []
    assert len(failures(runs(shares=[0.08, 0.3, 0.3, 0.32]), 4.0)) == 1
    assert len(failures(runs(ttft_p99=0.31), 4.0)) == 1
    assert len(failures(runs(errors={"http_503": 1}), 4.0)) == 1
    few = runs()
    few[OURS] = {**few[OURS], "hit_rate": 0.6}
    assert len(failures(few, 4.0)) == 1

"""Metrics of placements: decisions by reason, estimates of live workers only."""

from tests.unit.scheduler_svc.test_request_queue import request, worker
from tokenmesh.services.scheduler_svc.index.indexed_placement import DecisionMetrics
from tokenmesh.services.scheduler_svc.placement import Decision
from tokenmesh.shared.ids import WorkerId
from tokenmesh.shared.messages.place import Candidate
from tokenmesh.shared.metrics import Metrics


def engines(metrics: Metrics) -> set[str]:
    """The workers with a series of estimates."""
    lines = metrics.render().decode().splitlines()
    counts = [line for line in lines if "placement_candidate_seconds_count{" in line]
    return {line.partition('engine="')[2].partition('"')[0] for line in counts}


def test_series_of_dead_workers_are_removed() -> None:
    metrics = Metrics()
    decisions = DecisionMetrics(metrics, sample_every=1)
    for generation in range(100):
        fleet = [worker(f"w{generation}"), worker(f"w{generation + 1}"), worker("full")]
        candidates = [
            Candidate(worker_id=each.worker_id, estimated_ttft_s=0.1, matched_tokens=64)
            for each in fleet[:2]
        ]
        if generation == 50:
            candidates.append(Candidate(worker_id=WorkerId("full"), estimated_ttft_s=0.1))
        decisions.record(request(), Decision(fleet[0], candidates, "prefix"), fleet)
    assert engines(metrics) == {"w99", "w100", "full"}
    shown = metrics.render().decode()
    assert 'placement_reasons_total{model_name="m",reason="prefix"} 100.0' in shown
    assert 'placement_matched_tokens_total{model_name="m"} 6400.0' in shown


def test_a_request_without_a_worker_is_not_counted() -> None:
    metrics = Metrics()
    DecisionMetrics(metrics, sample_every=1).record(request(), Decision(None, []), [worker("w")])
    assert "placement_reasons_total{" not in metrics.render().decode()

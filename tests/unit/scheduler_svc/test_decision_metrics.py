"""Metrics of placements: counted by reason, and of workers that live."""

from tests.unit.scheduler_svc.test_desk import request, worker
from tokenmesh.services.scheduler_svc.index.decision_metrics import DecisionMetrics
from tokenmesh.services.scheduler_svc.placement import Decision
from tokenmesh.shared.ids import WorkerId
from tokenmesh.shared.messages.place import Candidate
from tokenmesh.shared.metrics import Metrics


def engines(metrics: Metrics) -> set[str]:
    """Whose estimates are shown."""
    lines = metrics.render().decode().splitlines()
    counts = [line for line in lines if "placement_candidate_seconds_count{" in line]
    return {line.partition('engine="')[2].partition('"')[0] for line in counts}


def test_workers_that_are_gone_are_shown_no_more() -> None:
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
        decisions.note(request(), Decision(fleet[0], candidates, "prefix"), fleet)
    assert engines(metrics) == {"w99", "w100", "full"}
    shown = metrics.render().decode()
    assert 'placement_reasons_total{model_name="m",reason="prefix"} 100.0' in shown
    assert 'placement_matched_tokens_total{model_name="m"} 6400.0' in shown


def test_a_request_that_found_nobody_is_not_counted() -> None:
    metrics = Metrics()
    DecisionMetrics(metrics, sample_every=1).note(request(), Decision(None, []), [worker("w")])
    assert "placement_reasons_total{" not in metrics.render().decode()

"""scripts/fuzz_api.py: which failures of a report count."""

import json
from pathlib import Path

from scripts.fuzz_api import failed_checks


def test_failed_checks_are_counted_by_name(tmp_path: Path) -> None:
    def scenario(**statuses: str) -> str:
        checks = [{"name": name, "status": status} for name, status in statuses.items()]
        recorder = {"checks": {"a": checks}}
        return json.dumps({"ScenarioFinished": {"status": "failure", "recorder": recorder}})

    lines = [
        scenario(not_a_server_error="success", positive_data_acceptance="failure"),
        scenario(not_a_server_error="failure", positive_data_acceptance="failure"),
        json.dumps({"PhaseFinished": {"phase": {"name": "coverage"}, "status": "failure"}}),
    ]
    report = tmp_path / "report.ndjson"
    report.write_text("\n".join(lines))
    assert failed_checks(report) == {"positive_data_acceptance": 2, "not_a_server_error": 1}

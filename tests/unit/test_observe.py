"""Dashboards and alerts name metrics, labels and services that exist."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.generate_dashboards import files
from tokenmesh.shared.metrics.table import METRICS
from tokenmesh.shared.services import SERVICE_BY_NAME

ROOT = Path(__file__).resolve().parent.parent.parent
CHART = ROOT / "deploy/chart/files"
TABLE = {metric.name: metric for metric in METRICS}
PARTS = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
SERIES = {metric.name + part: metric for metric in METRICS for part in PARTS[metric.kind]}
OTHERS = {"up", "process_cpu_seconds_total", "process_resident_memory_bytes"}
"""Metrics of Prometheus, and of prometheus_client for every process."""
OF_A_SCRAPE = {"job", "instance", "le"}

NAME = re.compile(r"tokenmesh:(\w+)")
SELECTOR = re.compile(r"tokenmesh:(\w+)\{([^}]*)\}")
MATCHER = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"")
AGGREGATION = re.compile(r"by \(([^)]*)\)")
WORD = re.compile(r"(?<![\w:])([a-z]\w*_(?:total|bytes|seconds)|up)(?=[{\s\[)]|$)")


def expressions() -> list[tuple[str, str]]:
    """Where each PromQL expression stands, and the expression."""
    found = []
    for path in sorted((CHART / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text("utf-8"))["panels"]:
            found += [(f"{path.stem}: {panel['title']}", each["expr"]) for each in panel["targets"]]
    for rule in alerts():
        found.append((rule["alert"], rule["expr"]))
    return found


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((CHART / "alerts.yaml").read_text("utf-8"))["groups"]
    return list(group["rules"])


@pytest.mark.parametrize(("place", "expression"), expressions(), ids=lambda value: value[:40])
def test_every_metric_of_a_dashboard_or_alert_exists(place: str, expression: str) -> None:
    names = set(NAME.findall(expression))
    assert names <= set(SERIES), place
    assert names or set(WORD.findall(expression)) & OTHERS, place
    assert set(WORD.findall(expression)) <= OTHERS, place
    known = OF_A_SCRAPE.union(*(SERIES[name].labels for name in names))
    for labels in AGGREGATION.findall(expression):
        assert {each.strip() for each in labels.split(",") if each.strip()} <= known, place
    for name, matchers in SELECTOR.findall(expression):
        assert set(MATCHER.findall(matchers)) <= {*SERIES[name].labels, *OF_A_SCRAPE}, place
    assert expression.count("(") == expression.count(")")


def test_the_dashboards_are_those_of_the_script() -> None:
    assert {path: path.read_text("utf-8") for path in files()} == files()
    names = {path.stem for path in (CHART / "dashboards").iterdir()}
    assert names == {"overview", "engine", "placement", "tenants"}


def test_legends_name_labels_of_the_result() -> None:
    for path in files():
        for panel in json.loads(path.read_text("utf-8"))["panels"]:
            for target in panel["targets"]:
                named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
                series = {
                    label for name in NAME.findall(target["expr"]) for label in SERIES[name].labels
                }
                assert named <= series | OF_A_SCRAPE, panel["title"]


def test_alerts_say_what_is_wrong_and_how_severe_it_is() -> None:
    names = [rule["alert"] for rule in alerts()]
    assert len(set(names)) == len(names) > 10
    for rule in alerts():
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert rule["annotations"]["summary"]
        assert re.fullmatch(r"\d+m", rule["for"])
    page = (ROOT / "docs/guides/observe.md").read_text("utf-8")
    assert [name for name in names if f"`{name}`" not in page] == []


def test_prometheus_scrapes_every_service_under_its_name() -> None:
    config = yaml.safe_load((ROOT / "compose/prometheus.yaml").read_text("utf-8"))
    assert {each["job_name"] for each in config["scrape_configs"]} == set(SERVICE_BY_NAME)


def test_the_collector_keeps_failed_slow_and_recovered_requests() -> None:
    config = yaml.safe_load((ROOT / "compose/collector.yaml").read_text("utf-8"))
    sampling = config["processors"]["tail_sampling"]
    policies = {each["name"]: each for each in sampling["policies"]}
    assert set(policies) == {"failed", "slow", "recovered", "share"}
    condition = policies["recovered"]["ottl_condition"]["span"][0]
    span = re.search(r'name == "(\w+)"', condition)
    assert span is not None
    guide = (ROOT / "docs/guides/read-a-trace.md").read_text("utf-8")
    assert f"| `{span[1]}` |" in guide
    for pipeline in config["service"]["pipelines"].values():
        for kind in ("receivers", "processors", "exporters"):
            assert set(pipeline[kind]) <= set(config[kind])
        assert pipeline["processors"][0] == "memory_limiter"

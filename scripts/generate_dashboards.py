"""Writes the Grafana dashboards of `deploy/chart/files/dashboards`.

With --check it changes nothing and fails where a file differs. compose mounts the folder, the chart
makes a ConfigMap of it.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # not the checkout installed

from scripts.generated_files import ROOT, write_or_check

FOLDER: Final = ROOT / "deploy/chart/files/dashboards"
MODELS: Final = 'model_name=~"$model"'
_WIDTH: Final = 12
_WITH_EXEMPLARS: Final = ("time_to_first_token_seconds", "e2e_request_latency_seconds")
"""Observations of these link to the trace of a request."""
_HEIGHT: Final = 8


@dataclass(frozen=True)
class Panel:
    """A diagram over time; `queries` are PromQL and a legend."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    help: str = ""


def rate(name: str, by: str = "", matchers: str = "") -> str:
    """Events of a counter a second."""
    return f"sum by ({by}) (rate(tokenmesh:{name}_total{{{matchers}}}[$__rate_interval]))"


def gauge(name: str, by: str = "", matchers: str = "") -> str:
    """The sum of a gauge."""
    return f"sum by ({by}) (tokenmesh:{name}{{{matchers}}})"


def rates(
    title: str, name: str, by: str = "", matchers: str = "", unit: str = "reqps", legend: str = ""
) -> Panel:
    """One counter, a line for each value of the labels `by`."""
    shown = legend or " ".join(f"{{{{{each.strip()}}}}}" for each in by.split(",") if each)
    return Panel(title, unit, ((rate(name, by, matchers), shown or name),))


def percentiles(title: str, name: str, *which: int, unit: str = "s") -> Panel:
    """Percentiles of a histogram of the chosen models."""
    buckets = f"sum by (le) (rate(tokenmesh:{name}_bucket{{{MODELS}}}[$__rate_interval]))"
    queries = ((f"histogram_quantile(0.{each}, {buckets})", f"p{each}") for each in which)
    return Panel(title, unit, tuple(queries))


def of_engines(title: str, name: str, unit: str = "short") -> Panel:
    """A gauge of each engine of the chosen models."""
    return Panel(title, unit, ((f"tokenmesh:{name}{{{MODELS}}}", "{{engine}}"),))


FAILED: Final = rate("http_requests", "", 'status=~"5.."') + " / " + rate("http_requests")
HITS: Final = (
    f"{rate('prefix_cache_hits', 'engine', MODELS)}"
    f" / {rate('prefix_cache_queries', 'engine', MODELS)}"
)
LATE: Final = (
    "histogram_quantile(0.99, sum by (le, job) "
    "(rate(tokenmesh:event_loop_lag_seconds_bucket[$__rate_interval])))"
)
DRAFTED: Final = rate("spec_decode_num_accepted_tokens", "model_name", MODELS)
ACCEPTANCE_LENGTH: Final = f"1 + {DRAFTED} / {rate('spec_decode_num_drafts', 'model_name', MODELS)}"
ACCEPTED: Final = f"{DRAFTED} / {rate('spec_decode_num_draft_tokens', 'model_name', MODELS)}"
BY_PLACE: Final = (
    f"{rate('spec_decode_num_accepted_tokens_per_pos', 'position', MODELS)}"
    f" / on() group_left() {rate('spec_decode_num_drafts', '', MODELS)}"
)
CORES: Final = "sum by (job) (rate(process_cpu_seconds_total[$__rate_interval]))"

OVERVIEW: Final = (
    percentiles("Time to first token", "time_to_first_token_seconds", 50, 95),
    percentiles("Between tokens", "inter_token_latency_seconds", 50, 95),
    percentiles("Whole request", "e2e_request_latency_seconds", 50, 95),
    Panel(
        "Tokens a second",
        "short",
        (
            (rate("generation_tokens", "model_name", MODELS), "{{model_name}} generated"),
            (rate("prompt_tokens", "model_name", MODELS), "{{model_name}} prompt"),
        ),
    ),
    rates("HTTP requests a second by status", "http_requests", "status"),
    Panel("Share of failed HTTP requests", "percentunit", ((FAILED, "5xx"),)),
    Panel(
        "Streams and queue",
        "short",
        (
            (gauge("num_requests_running", "", MODELS), "running"),
            (gauge("num_requests_waiting", "", MODELS), "waiting in workers"),
            (gauge("placement_waiting"), "waiting for a worker"),
        ),
    ),
    Panel(
        "Processes",
        "short",
        (("max by (service) (tokenmesh:members)", "{{service}}"),),
        "Live processes, as the gateway or scheduler that knows most sees them.",
    ),
    rates("Streams moved to another worker, a second", "recoveries", "reason"),
    Panel("Cores in use", "short", ((CORES, "{{job}}"),)),
    Panel("Memory", "bytes", (("sum by (job) (process_resident_memory_bytes)", "{{job}}"),)),
    Panel("Event loops: how late a timer is", "s", ((LATE, "{{job}} p99"),)),
)
ENGINE: Final = (
    of_engines("KV cache in use", "kv_cache_usage_perc", "percentunit"),
    of_engines("Streams in the batch", "num_requests_running"),
    Panel(
        "Streams that wait, by reason",
        "short",
        ((gauge("num_requests_waiting_by_reason", "reason", MODELS), "{{reason}}"),),
    ),
    rates("Preempted streams a second", "num_preemptions", "engine", MODELS),
    percentiles("A step", "engine_step_seconds", 50, 95, 99),
    percentiles("Tokens of a step", "iteration_tokens_total", 50, 95, unit="short"),
    percentiles("Waiting for a row", "request_queue_time_seconds", 50, 95),
    percentiles("Prefill", "request_prefill_time_seconds", 50, 95),
    percentiles("Decode", "request_decode_time_seconds", 50, 95),
    Panel("Share of prompt tokens from the prefix cache", "percentunit", ((HITS, "{{engine}}"),)),
    Panel(
        "Memory of the KV cache",
        "bytes",
        (
            (gauge("kv_cache_bytes", "engine", MODELS), "{{engine}}"),
            (gauge("kv_cache_used_bytes", "engine", MODELS), "{{engine}} used"),
        ),
    ),
    percentiles("Prompt tokens of a request", "request_prompt_tokens", 50, 95, unit="short"),
    Panel(
        "Tokens of a stream in a step with drafts",
        "short",
        ((ACCEPTANCE_LENGTH, "{{model_name}}"),),
        "The acceptance length: accepted drafts, and the token that would come without them.",
    ),
    Panel(
        "Share of drafts that were accepted",
        "percentunit",
        ((ACCEPTED, "{{model_name}}"), (BY_PLACE, "draft {{position}}")),
    ),
)
PLACEMENT: Final = (
    percentiles("A placement, waiting included", "placement_seconds", 50, 95, 99),
    rates("Placements a second by outcome", "placements", "outcome"),
    rates("Why that worker", "placement_reasons", "reason", MODELS),
    Panel("Requests that wait for a worker", "short", ((gauge("placement_waiting"), "waiting"),)),
    rates(
        "Prompt tokens that the chosen workers had, a second",
        "placement_matched_tokens",
        "model_name",
        MODELS,
        "short",
    ),
    percentiles("Estimated time to first token", "placement_candidate_seconds", 50, 95),
    Panel(
        "Prefix index",
        "short",
        (
            ("max(tokenmesh:prefix_index_away)", "away"),
            (rate("prefix_index_failures"), "lookups without an answer"),
            (rate("prefix_index_mends"), "repairs"),
        ),
    ),
    of_engines("Route blocks in the index", "prefix_index_blocks"),
    rates("Placements given back unused", "placements_unused", legend="unused"),
    Panel(
        "Workers that gateways avoid", "short", (("max(tokenmesh:workers_left_out)", "workers"),)
    ),
)
TENANTS: Final = (
    rates("Requests a second", "tenant_requests", "tenant", 'outcome="admitted"'),
    rates("Refused requests a second", "tenant_requests", "tenant, outcome", 'outcome!="admitted"'),
    rates("Prompt tokens a second", "tenant_tokens", "tenant", 'kind="prompt"', "short"),
    rates("Generated tokens a second", "tenant_tokens", "tenant", 'kind="completion"', "short"),
    rates("Cached prompt tokens a second", "tenant_tokens", "tenant", 'kind="cached"', "short"),
    Panel(
        "Usage that Redis does not know of yet",
        "short",
        ((gauge("usage_untold_tokens"), "tokens"),),
    ),
    rates("Requests judged without Redis, a second", "limits_kept_alone", legend="requests"),
    rates("New versions of the key file", "key_file_reloads", "outcome"),
)
BOARDS: Final = {
    "overview": ("Overview", OVERVIEW),
    "engine": ("Engine", ENGINE),
    "placement": ("Placement", PLACEMENT),
    "tenants": ("Tenants", TENANTS),
}


def board(name: str, title: str, panels: tuple[Panel, ...]) -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    return {
        "uid": f"tokenmesh-{name}",
        "title": f"TokenMesh: {title}",
        "tags": ["tokenmesh"],
        "schemaVersion": 39,
        "timezone": "browser",
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [
            {"title": "TokenMesh", "type": "dashboards", "tags": ["tokenmesh"], "asDropdown": True}
        ],
        "templating": {"list": [_source(), _models()]},
        "panels": [_panel(number, each) for number, each in enumerate(panels)],
    }


def _source() -> dict[str, Any]:
    return {"name": "source", "label": "Source", "type": "datasource", "query": "prometheus"}


def _models() -> dict[str, Any]:
    return {
        "name": "model",
        "label": "Model",
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "query": "label_values(tokenmesh:num_requests_running, model_name)",
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${source}"}
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.help,
        "datasource": source,
        "gridPos": {
            "h": _HEIGHT,
            "w": _WIDTH,
            "x": number % 2 * _WIDTH,
            "y": number // 2 * _HEIGHT,
        },
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"tooltip": {"mode": "multi"}},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "expr": expr,
                "legendFormat": legend,
                "datasource": source,
                "exemplar": any(name in expr for name in _WITH_EXEMPLARS),
            }
            for index, (expr, legend) in enumerate(panel.queries)
        ],
    }


def files() -> dict[Path, str]:
    """Path -> what should be in it."""
    return {
        FOLDER / f"{name}.json": json.dumps(board(name, title, panels), indent=1) + "\n"
        for name, (title, panels) in BOARDS.items()
    }


if __name__ == "__main__":
    sys.exit(write_or_check(__doc__, files()))

"""docs/reference/chart.md: every value of the chart, with its type, its default and its meaning."""

import json
from collections.abc import Iterator
from typing import Any, Final

import yaml

from scripts.generated_files import ROOT

_CHART: Final = ROOT / "deploy/chart"
_BOUNDS: Final = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<="}


def chart_page() -> str:
    """The page without the note on its first line."""
    schema = json.loads((_CHART / "values.schema.json").read_text("utf-8"))
    defaults = yaml.safe_load((_CHART / "values.yaml").read_text("utf-8"))
    lines = [
        "# Values of the chart\n",
        "Of `deploy/chart`; [from compose to a cluster](../guides/kubernetes.md) describes how to "
        "use it.\n`models[]` stands for each model of the list.\n",
        "| value | type | default | meaning |",
        "|---|---|---|---|",
    ]
    for name, value in leaves(schema):
        meaning = value["description"].replace("|", "\\|")
        lines.append(f"| {name} | {_type(value)} | {_default(defaults, name)} | {meaning} |")
    return "\n".join(lines) + "\n"


def leaves(schema: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and schema of every value that may be set, those of objects in lists included."""
    for name, value in schema["properties"].items():
        path = f"{prefix}{name}"
        items = value.get("items", {})
        if "properties" in value:
            yield from leaves(value, f"{path}.")
        elif "properties" in items:
            yield from leaves(items, f"{path}[].")
        else:
            yield path, value


def _type(value: dict[str, Any]) -> str:
    if "enum" in value:
        return " or ".join(f"`{each}`" for each in value["enum"])
    kinds = value["type"] if isinstance(value["type"], list) else [value["type"]]
    bounds = [f"{sign} {value[key]}" for key, sign in _BOUNDS.items() if key in value]
    return " ".join([" or ".join(kinds), ", ".join(bounds)]).strip()


def _default(defaults: Any, name: str) -> str:
    for part in name.split("."):
        key, _, is_list = part.partition("[")
        if key not in defaults:
            return ""
        defaults = defaults[key][0] if is_list else defaults[key]
    if defaults in ("", [], {}):
        return ""
    return f"`{json.dumps(defaults).strip(chr(34))}`"

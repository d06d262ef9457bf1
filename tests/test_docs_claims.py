"""What the documentation names exists: settings, metrics, subjects, files, headings, spans, codes."""

import ast
import fnmatch
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from tokenmesh.services.gateway.openai.errors import NotSupported, UnsupportedMediaType
from tokenmesh.services.gateway.tenancy.standing import QuotaExceeded, RateLimited
from tokenmesh.shared import errors
from tokenmesh.shared.config.catalog import fields
from tokenmesh.shared.config.layers import environment_name
from tokenmesh.shared.errors import TokenMeshError
from tokenmesh.shared.messages import Message
from tokenmesh.shared.metrics.table import METRICS
from tokenmesh.shared.service import exit_codes
from tokenmesh.shared.subject_table import SUBJECTS

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "docs/log.md"
"""What was true on its day."""
PAGES = sorted(
    {
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "tokenmesh").rglob("README.md"),
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
        *(ROOT / folder / "README.md" for folder in ("compose", "benchmarks")),
    }
    - {NOTEBOOK}
)
CODE = {
    path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "tokenmesh").rglob("*.py"))
}
STRINGS = {
    node.value
    for text in CODE.values()
    for node in ast.walk(ast.parse(text))
    if isinstance(node, ast.Constant) and isinstance(node.value, str)
}
SETTINGS = {".".join(key) for key, _ in fields()}
VARIABLES = {environment_name(key) for key, _ in fields()}
KINDS = {metric.name: metric.kind for metric in METRICS}

SPAN = re.compile(r"`([^`\n]+)`")
SETTING = re.compile(r"(?<![\w./-])([a-z_]+(?:\.[a-z0-9_]+)*\.[a-z0-9_*]+)(?![\w(./])")
METRIC = re.compile(r"(?:tokenmesh|vllm):([a-z_]+\*?)")
VARIABLE = re.compile(r"\bTOKENMESH_[A-Z0-9_]+\b")
SUBJECT = re.compile(r"(?<![\w.])tm\.[a-z]+\.[\w.<>*]+")
FILE = re.compile(r"^[\w.-]+(?:/[\w.-]+)+(?:\.(?:py|md|json|lua|toml|yaml|c|jinja)|/)$")
LINK = re.compile(r"\]\((?!https?://|mailto:)([^)\s]*)#([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)

BASES = ("", "tokenmesh", "tokenmesh/services", "tokenmesh/services/gateway", "tokenmesh/shared")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def code_of(page: Path) -> Iterator[str]:
    """Everything in backticks, and every line of a code block."""
    text = page.read_text(encoding="utf-8")
    for block in FENCE.findall(text):
        yield from block.splitlines()[1:-1]
    yield from SPAN.findall(FENCE.sub("", text))


def is_setting(name: str) -> bool:
    return bool(
        fnmatch.filter(
            SETTINGS, name if "*" in name else f"{name}*" if name.endswith("_") else name
        )
    )


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_setting_that_is_named_exists(page: Path) -> None:
    sections = {name for name in SETTINGS if "." not in name} | {"model"}
    wrong = [
        name
        for text in code_of(page)
        if not text.startswith(("import ", "from "))
        for name in SETTING.findall(text)
        if name.partition(".")[0] in sections
        and name.rpartition(".")[2] not in ("py", "md", "json", "toml", "lua", "yaml")
        and not is_setting(name)
        # spans are named in the same way
        and name not in STRINGS
    ]
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_variable_that_is_named_exists(page: Path) -> None:
    named = {name for text in code_of(page) for name in VARIABLE.findall(text)}
    assert {name for name in named if not name.endswith("_")} <= VARIABLES


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_metric_that_is_named_exists(page: Path) -> None:
    named = {name for text in code_of(page) for name in METRIC.findall(text)}
    wrong = {
        name
        for name in named
        if not fnmatch.filter(KINDS, name)
        and KINDS.get(re.sub(r"_(total|bucket|sum|count)$", "", name))
        not in ("counter", "histogram")
    }
    assert wrong == set()
    assert not any("`vllm:" in text for text in (page.read_text(encoding="utf-8"),))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_subject_that_is_named_exists(page: Path) -> None:
    patterns = [each.wildcard for each in SUBJECTS]
    named = {name.rstrip(".") for text in code_of(page) for name in SUBJECT.findall(text)}
    wrong = {
        name
        for name in named
        if not any(is_part_of(name.split("."), pattern.split(".")) for pattern in patterns)
    }
    assert wrong == set()


def is_part_of(name: list[str], pattern: list[str]) -> bool:
    """Whether a subject, perhaps with wildcards of its own, is one of a pattern's."""
    if name[-1] in (">", "*"):
        name, pattern = name[:-1], pattern[: len(name) - 1]
    return len(name) == len(pattern) and all(
        theirs in ("*", ours) for ours, theirs in zip(name, pattern, strict=True)
    )


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_file_that_is_named_exists(page: Path) -> None:
    places = [ROOT / base for base in BASES] + [page.parent]
    wrong = [
        text
        for text in SPAN.findall(FENCE.sub("", page.read_text(encoding="utf-8")))
        if FILE.match(text) and not any((place / text).exists() for place in places)
    ]
    assert wrong == []


def slugs(page: Path) -> set[str]:
    """The anchors of a page's headings, as the usual viewers make them."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        for heading in HEADING.findall(text)
    }


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_heading_that_is_linked_exists(page: Path) -> None:
    wrong = [
        f"{link}#{anchor}"
        for link, anchor in LINK.findall(page.read_text(encoding="utf-8"))
        if anchor not in slugs((page.parent / link) if link else page)
    ]
    assert wrong == []


def test_every_span_is_in_the_guide() -> None:
    guide = (ROOT / "docs/guides/read-a-trace.md").read_text(encoding="utf-8")
    made = re.compile(r"\b(?:span|Tally)\(\s*\"([\w.]+)\"")
    names = {name for text in CODE.values() for name in made.findall(text)}
    names |= {
        each for each in STRINGS if re.fullmatch(r"worker\.(grammar|queue|prefill|decode)", each)
    }
    assert {"http", "tokenize", "worker.decode", "flush"} <= names
    assert sorted(name for name in names if f"`{name}`" not in guide) == []


def test_every_message_has_a_subject_or_is_an_answer() -> None:
    carried = " ".join(each.carries for each in SUBJECTS)
    names = {kind.__name__ for kind in get_args(Message)}
    # Failed may answer everything, as the page says
    assert (
        sorted(name for name in names - {"Failed"} if not re.search(rf"\b{name}\b", carried)) == []
    )


def test_every_error_that_a_client_may_meet_is_in_the_table() -> None:
    text = (ROOT / "docs/http-api.md").read_text(encoding="utf-8").partition("\n## Errors\n")[2]
    ours = [each for each in vars(errors).values() if isinstance(each, type)]
    kinds = [*ours, NotSupported, UnsupportedMediaType, RateLimited, QuotaExceeded]
    inside = {"config_error", "checkpoint_error", "protocol_error", "cancelled"}
    codes = {(each.status, each.code) for each in kinds if issubclass(each, TokenMeshError)}
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| ")]
    missing = [
        (status, code)
        for status, code in sorted(codes)
        if code not in inside
        and not any(str(status) in row[1] and f"`{code}`" in row[2] for row in rows)
    ]
    assert missing == []


def test_every_exit_code_is_told() -> None:
    text = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    codes = {value for name, value in vars(exit_codes).items() if name.isupper()}
    assert sorted(code for code in codes if f"exit code {code}" not in text) == []

"""Settings, metrics, subjects, files, headings and errors that the documentation names exist."""

import ast
import fnmatch
import re
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

from tests.fakes.pages import ROOT, anchors, commands, on_every_page, prose, rows, spans
from tokenmesh.cli.api import URL_VARIABLES
from tokenmesh.engine.models.native.registry import FAMILIES, IMAGE_ARCHITECTURES
from tokenmesh.services.gateway.core.http.errors import NotSupported, UnsupportedMediaType
from tokenmesh.services.gateway.core.tenancy.tenant import QuotaExceeded, RateLimited
from tokenmesh.shared import errors
from tokenmesh.shared.config.layers import environment_name, field_at, fields
from tokenmesh.shared.errors import TokenMeshError
from tokenmesh.shared.lifecycle import ExitCode
from tokenmesh.shared.messages import Message
from tokenmesh.shared.metrics.table import METRICS
from tokenmesh.shared.subject_table import SUBJECTS

SETTINGS = {".".join(key) for key, _ in fields()}
SECTIONS = {name for name in SETTINGS if "." not in name} | {"model"}
VARIABLES = {environment_name(key) for key, _ in fields()} | {*URL_VARIABLES}
KINDS = {metric.name: metric.kind for metric in METRICS}
FILES = [
    "/" + str(path.relative_to(ROOT)) + ("/" if path.is_dir() else "")
    for folder in ("tokenmesh", "tests", "docs", "benchmarks", "scripts", "compose", "deploy")
    for path in (ROOT / folder).rglob("*")
]

SETTING = re.compile(r"(?<![\w./-])([a-z_]+(?:\.[a-z0-9_]+)*\.[a-z0-9_*]+)(?![\w(./])")
SUFFIXES = ("py", "md", "json", "toml", "lua", "yaml")
METRIC = re.compile(r"(?:tokenmesh|vllm):([a-z0-9_]+\*?)")
PART = re.compile(r"_(?:total|bucket|sum|count)$")
VARIABLE = re.compile(r"\bTOKENMESH_[A-Z0-9_]+\b")
SUBJECT = re.compile(r"(?<![\w.])tm\.[a-z]+\.[\w.<>*]+")
FILE = re.compile(r"^[\w.-]+(?:/[\w.-]+)+(?:\.(?:py|md|json|lua|toml|yaml|c|h|inc|jinja)|/)$")
LINK = re.compile(r"\]\((?!https?://|mailto:)([^)\s]*)#([^)\s]+)\)")
NUMBER = re.compile(r"^([\d.,]+)(?: (s|KiB|MiB))?$")
SCALES = {None: 1, "s": 1, "KiB": 1 << 10, "MiB": 1 << 20}


@cache
def strings() -> set[str]:
    """All strings of the sources."""
    return {
        node.value
        for path in sorted((ROOT / "tokenmesh").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def is_setting(name: str) -> bool:
    pattern = f"{name}*" if name.endswith("_") else name
    return bool(fnmatch.filter(SETTINGS, pattern))


@on_every_page
def test_every_setting_that_is_named_exists(page: Path) -> None:
    named = {name for text in spans(page) for name in SETTING.findall(text)}
    wrong = {
        name
        for name in named
        if name.partition(".")[0] in SECTIONS
        and name.rpartition(".")[2] not in SUFFIXES
        and not is_setting(name)
        # spans are named in the same way
        and name not in strings()
    }
    assert wrong == set()


@on_every_page
def test_every_variable_that_is_named_exists(page: Path) -> None:
    named = {name for text in (*spans(page), *commands(page)) for name in VARIABLE.findall(text)}
    assert {name for name in named if not name.endswith("_")} <= VARIABLES


@on_every_page
def test_every_metric_that_is_named_exists(page: Path) -> None:
    inline = {name for text in spans(page) for name in METRIC.findall(text)}
    # a command may look for a beginning
    searched = {f"{name}*" for text in commands(page) for name in METRIC.findall(text)}
    wrong = {
        name
        for name in inline | searched
        if not fnmatch.filter(KINDS, name)
        and KINDS.get(PART.sub("", name.rstrip("*"))) not in ("counter", "histogram")
    }
    assert wrong == set()
    assert [text for text in spans(page) if text.startswith("vllm:") and len(text) > 5] == []


@on_every_page
def test_every_subject_that_is_named_exists(page: Path) -> None:
    patterns = [each.wildcard.split(".") for each in SUBJECTS]
    named = {name.rstrip(".") for text in spans(page) for name in SUBJECT.findall(text)}
    assert {name for name in named if not is_one_of(name.split("."), patterns)} == set()


def is_one_of(name: list[str], patterns: list[list[str]]) -> bool:
    """Return whether a subject, perhaps with a wildcard at its end, is one of these."""
    if name[-1] in (">", "*"):
        name = name[:-1]
        patterns = [pattern[: len(name)] for pattern in patterns]
    return any(
        len(name) == len(pattern)
        and all(theirs in ("*", ours) for ours, theirs in zip(name, pattern, strict=True))
        for pattern in patterns
    )


@on_every_page
def test_every_file_that_is_named_exists(page: Path) -> None:
    wrong = [
        text
        for text in spans(page)
        if FILE.match(text) and not any(f"/{text.removeprefix('../')}" in each for each in FILES)
    ]
    assert wrong == []


@on_every_page
def test_every_heading_that_is_linked_exists(page: Path) -> None:
    wrong = [
        f"{link}#{anchor}"
        for link, anchor in LINK.findall(prose(page))
        if anchor not in anchors((page.parent / link) if link else page)
    ]
    assert wrong == []


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs/README.md"
    text = index.read_text(encoding="utf-8")
    pages = [page for page in (ROOT / "docs").rglob("*.md") if "adr" not in page.parts]
    missing = [each for each in pages if f"({each.relative_to(index.parent)})" not in text]
    assert [each for each in missing if each != index] == []


def test_every_decision_is_listed_and_says_why() -> None:
    index = (ROOT / "docs/adr/README.md").read_text(encoding="utf-8")
    decisions = sorted((ROOT / "docs/adr").glob("0*.md"))
    assert [int(page.name[:4]) for page in decisions] == list(range(1, len(decisions) + 1))
    for page in decisions:
        text = page.read_text(encoding="utf-8")
        assert f"({page.name})" in index
        assert text.startswith(f"# ADR {int(page.name[:4])}: ")
        assert re.search(r"^## (Background|Problem)$", text, re.MULTILINE)
        assert "\n## Decision\n" in text
        assert re.search(r"^## (Cost|Consequences)$", text, re.MULTILINE), page.name


def test_every_span_is_in_the_guide() -> None:
    guide = (ROOT / "docs/guides/read-a-trace.md").read_text(encoding="utf-8")
    made = re.compile(r"\b(?:span|Tally)\(\s*\"([\w.]+)\"")
    code = [path.read_text(encoding="utf-8") for path in (ROOT / "tokenmesh").rglob("*.py")]
    names = {name for text in code for name in made.findall(text)}
    names |= {f"worker.{name}" for name in ("grammar", "queue", "prefill", "decode")}
    assert {"http", "tokenize", "flush"} <= names
    assert sorted(name for name in names if f"`{name}`" not in guide) == []


def test_every_message_is_carried_by_a_subject() -> None:
    carried = set(re.findall(r"\w+", " ".join(each.carries for each in SUBJECTS)))
    names = {kind.__name__ for kind in get_args(Message)}
    # Failed may answer every request
    assert sorted(names - carried - {"Failed"}) == []


def test_every_error_of_a_client_is_in_the_table() -> None:
    ours = [each for each in vars(errors).values() if isinstance(each, type)]
    kinds = [*ours, NotSupported, UnsupportedMediaType, RateLimited, QuotaExceeded]
    inside = {"config_error", "checkpoint_error", "protocol_error", "cancelled"}
    codes = {(each.status, each.code) for each in kinds if issubclass(each, TokenMeshError)}
    table = rows(ROOT / "docs/http-api.md", "## Errors")
    missing = [
        (status, code)
        for status, code in sorted(codes)
        if code not in inside
        and not any(str(status) in row[0] and f"`{code}`" in row[1] for row in table)
    ]
    assert missing == []


def test_every_exit_code_is_documented() -> None:
    codes = {str(int(code)) for code in ExitCode}
    documented = {row[0] for row in rows(ROOT / "docs/on-call.md", "## A worker died or hangs")}
    assert codes <= documented


def test_limits_are_those_of_the_code() -> None:
    wrong, checked = [], 0
    for row in rows(ROOT / "docs/limits.md", "## Limits"):
        found = NUMBER.match(row[1]) if len(row) == 4 else None
        if found is None or row[2] == "constant":
            continue
        value = float(found[1].replace(",", "")) * SCALES[found[2]]
        default = field_at(tuple(row[2].strip("`").split("."))).default
        checked += 1
        if value != default:
            wrong.append((row[2], value, default))
    assert checked > 30
    assert wrong == []


def test_every_architecture_is_in_the_list_of_what_is_supported() -> None:
    (row,) = (
        row
        for row in rows(ROOT / "docs/limits.md", "## What is not supported")
        if row[0] == "Architectures"
    )
    documented = set(re.findall(r"\w+", row[1].partition(" are native")[0])) - {"and"}
    ends = re.compile(r"(?:ForCausalLM|ForConditionalGeneration)$")
    assert documented == {ends.sub("", name) for name in (*FAMILIES, *IMAGE_ARCHITECTURES)}


@pytest.mark.parametrize(
    ("page", "heading"),
    [
        ("docs/guides/serve-a-model.md", "## What may go wrong"),
        ("docs/on-call.md", "## The model does not answer as it should"),
    ],
)
def test_messages_are_quoted_as_the_code_has_them(page: str, heading: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8").partition(f"\n{heading}\n")[2]
    quoted = [each for each in re.findall(r"`([^`\n]+)`", text) if "..." in each]
    pieces = {piece for each in quoted for piece in each.split("...") if len(piece.strip()) > 3}
    assert pieces
    assert [
        each for each in pieces if not any(each.strip(" :-`") in text for text in strings())
    ] == []

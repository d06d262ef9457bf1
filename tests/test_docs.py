"""Code, links and routes that the documentation names exist."""

import ast
import re
from pathlib import Path

from tests.fakes.pages import ROOT, each_of

PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md"))]

WRITTEN = [page for page in PAGES if "reference" not in page.parts]
"""All but the pages that scripts/generate_reference.py and benchmarks/write_page.py make."""

ANCHOR = re.compile(r"`([\w/]+\.py):([A-Za-z_][\w.]*)`")
"""As in `gateway/core/mesh/pipeline.py:run`, relative to tokenmesh/ or tokenmesh/services/."""
METHODS = frozenset(("get", "post", "put", "delete", "websocket"))
FENCE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
MAX_LINE = 120
LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)")


def definitions(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {
                f"{node.name}.{child.name}"
                for child in node.body
                if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return names


def resolve(path: str) -> Path | None:
    for base in (ROOT, ROOT / "tokenmesh", ROOT / "tokenmesh/services"):
        if (base / path).is_file():
            return base / path
    return None


@each_of(PAGES)
def test_code_anchors_exist(page: Path) -> None:
    missing = []
    for path, name in ANCHOR.findall(page.read_text(encoding="utf-8")):
        found = resolve(path)
        if found is None or name not in definitions(ast.parse(found.read_text(encoding="utf-8"))):
            missing.append(f"{path}:{name}")
    assert missing == []


@each_of(PAGES)
def test_relative_links_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    broken = [link for link in LINK.findall(text) if not (page.parent / link).exists()]
    assert broken == []


@each_of(WRITTEN)
def test_lines_have_at_most_120_characters(page: Path) -> None:
    """Rows of tables, code blocks and lines that a link makes long may be longer."""
    text = FENCE.sub(lambda block: "\n" * block[0].count("\n"), page.read_text(encoding="utf-8"))
    lines = enumerate(text.split("\n"), 1)
    long = [(number, line) for number, line in lines if len(LINK.sub("]()", line)) > MAX_LINE]
    assert [number for number, line in long if not line.lstrip().startswith("|")] == []


def text_of(node: ast.AST | None, constants: dict[str, str]) -> str:
    """The value of a text in code, with the names of constants in it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part, constants) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return text_of(node.value, constants)
    return constants.get(node.id, "") if isinstance(node, ast.Name) else ""


def routes_of(tree: ast.Module) -> set[str]:
    """Paths of the routes that a module declares with `@router.…`."""
    constants: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            constants[node.target.id] = text_of(node.value, constants)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
    return {
        text_of(call.args[0], constants)
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in METHODS
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "router"
    }


def test_every_route_is_in_the_documentation() -> None:
    text = (ROOT / "docs/http-api.md").read_text(encoding="utf-8")
    documented = {words.split()[-1] for words in re.findall(r"`([^`\n]+)`", text)}
    endings = tuple(each.removeprefix("...") for each in documented if each.startswith("..."))
    modules = (ROOT / "tokenmesh/services/gateway").rglob("*.py")
    found = {route for path in modules for route in routes_of(ast.parse(path.read_text("utf-8")))}
    routes = {re.sub(r"\{[^}]+\}", "{id}", each) for each in found if each}
    assert {"/sleep", "/v1/batches/{id}/cancel"} <= routes
    missing = [each for each in routes - documented if not each.endswith(endings)]
    assert sorted(missing) == []


def test_the_request_path_names_every_service() -> None:
    text = (ROOT / "docs/request-path.md").read_text(encoding="utf-8")
    hops = {path for path, _ in ANCHOR.findall(text)}
    for service in ("gateway", "tokenizer_svc", "mm_encoder_svc", "scheduler_svc", "worker_svc"):
        assert any(service in hop for hop in hops), f"no hop in {service}"


def test_every_limit_of_a_request_is_in_the_config_reference() -> None:
    reference = (ROOT / "docs/reference/config.md").read_text("utf-8")
    for name in (
        "gateway.max_body_bytes",
        "tokenizer.max_messages",
        "gateway.max_tools",
        "gateway.max_schema_bytes",
        "gateway.max_regex_chars",
        "gateway.max_grammar_bytes",
        "gateway.max_logprobs",
        "gateway.max_choices",
    ):
        assert f"`{name}" in reference, name

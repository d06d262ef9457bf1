"""The distribution's name and the bounds of its requirements."""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
REQUIREMENTS = [
    Requirement(text)
    for texts in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    for text in texts
]
# Their behavior between releases matters to us beyond their documented interfaces.
BOUNDED = (
    "fastapi",
    "httptools",
    "llguidance",
    "mcp",
    "nats-py",
    "starlette",
    "torch",
    "transformers",
    "triton",
    "uvicorn",
    "websockets",
    "xgrammar",
)


def test_no_requirement_names_another_project_of_our_import_name() -> None:
    assert PROJECT["name"] == "tokenmesh-server"
    assert "tokenmesh" not in {each.name for each in REQUIREMENTS}
    assert PROJECT["name"] in {each.name for each in REQUIREMENTS}
    folders = ("tokenmesh", "docs", "compose", "benchmarks", "scripts")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    texts = {
        path: path.read_text("utf-8")
        for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile", *files]
        if path.suffix in (".md", ".py", ".yaml", ".sh", "") and path.is_file()
    }
    install = re.compile(r"(?:install|pipx|uvx) (?:-\S+ )*['\"]?tokenmesh(?![\w/-])")
    assert [str(path) for path, text in texts.items() if install.search(text)] == []


@pytest.mark.parametrize("name", BOUNDED)
def test_requirement_has_an_upper_bound(name: str) -> None:
    found = [each.specifier for each in REQUIREMENTS if each.name == name]
    assert found
    assert all(is_bounded(each) for each in found)


@pytest.mark.timeout(60)  # a busy machine imports slowly
def test_gateway_and_scheduler_load_no_torch() -> None:
    code = (
        "import sys, tokenmesh.services.gateway.main, tokenmesh.services.scheduler_svc.main\n"
        "heavy = {'torch', 'triton', 'transformers', 'xgrammar', 'numpy'} & sys.modules.keys()\n"
        "sys.exit(', '.join(sorted(heavy)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.timeout(60)  # reads every file of the package
def test_libraries_whose_private_names_are_used_have_an_upper_bound() -> None:
    distributions = packages_distributions()
    users = {
        distributions[module.partition(".")[0]][0].lower()
        for path in sorted((ROOT / "tokenmesh").rglob("*.py"))
        for module in private_uses(ast.parse(path.read_text("utf-8")))
    }
    assert {"uvicorn", "nats-py", "torch"} <= users
    assert {
        name
        for name in users
        if not any(each.name == name and is_bounded(each.specifier) for each in REQUIREMENTS)
    } == set()


def is_bounded(specifier: SpecifierSet) -> bool:
    return any(each.operator in ("<", "<=", "==", "~=") for each in specifier)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def imports(tree: ast.Module) -> dict[str, str]:
    """Local name -> full name, for other people's libraries."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {each.asname or each.name.partition(".")[0]: each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    ours = {"tokenmesh", *sys.stdlib_module_names}
    return {name: full for name, full in found.items() if full.partition(".")[0] not in ours}


def private_uses(tree: ast.Module) -> Iterator[str]:
    """Full names of what is used with its private parts: modules, objects and base classes."""
    names = imports(tree)
    yield from (full for full in names.values() if any(map(is_private, full.split("."))))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in names:
                yield names[root.id]
        elif isinstance(node, ast.ClassDef):
            mentioned = {
                each.attr if isinstance(each, ast.Attribute) else getattr(each, "name", "")
                for each in ast.walk(node)
            }
            private = {name for name in mentioned if name and is_private(name)}
            for base in bases(node, names) if private else ():
                if private & set(dir(resolve(base))):
                    yield base


def bases(node: ast.ClassDef, names: dict[str, str]) -> Iterator[str]:
    for base in node.bases:
        root, dot, rest = ast.unparse(base).partition(".")
        if root in names:
            yield names[root] + dot + rest


def resolve(name: str) -> object:
    """The object of a full name; the private names of a base class are seen on it alone."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)

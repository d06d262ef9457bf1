"""Reads which module imports which, and finds circles and imports to a higher floor.

The floors are those of the layers in pyproject.toml, which import-linter checks with all that is
imported indirectly; here each direct import counts that no contract lists.
"""

import ast
import tomllib
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent

Graph = Mapping[str, frozenset[str]]
"""The modules that each module imports, also in functions and for types only."""


def import_graph(root: Path = ROOT, package: str = "tokenmesh") -> Graph:
    """Return the imports between the modules of a package."""
    files = {_name(path.relative_to(root)): path for path in sorted((root / package).rglob("*.py"))}
    return {name: frozenset(_imports(path, files)) - {name} for name, path in files.items()}


def _name(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def _imports(path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module:
            within = (f"{node.module}.{each.name}" for each in node.names)
            names = [each if each in known else node.module for each in within]
        elif isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        yield from (each for each in names if each in known)


def circles(graph: Graph) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or through others."""
    left = {name: set(imported) for name, imported in graph.items()}
    # What imports nothing that is left is in no circle. The search below takes long for many.
    while ends := {name for name, imported in left.items() if not imported}:
        left = {name: each - ends for name, each in left.items() if name not in ends}
    reached = {name: _reached(left, name) for name in left}
    found = {
        tuple(sorted({name, *(each for each in reached[name] if name in reached[each])}))
        for name in left
        if name in reached[name]
    }
    return [list(each) for each in sorted(found)]


def _reached(graph: Mapping[str, set[str]], start: str) -> set[str]:
    """Return what a module imports, directly or through others."""
    seen: set[str] = set()
    ahead = [*graph[start]]
    while ahead:
        name = ahead.pop()
        if name not in seen:
            seen.add(name)
            ahead += graph[name]
    return seen


def upward(graph: Graph, root: Path = ROOT) -> list[str]:
    """Return a line for each import from a floor to one above it that no contract lists."""
    with (root / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    return [line for each in contracts if each["type"] == "layers" for line in _upward(graph, each)]


def _upward(graph: Graph, contract: Mapping[str, Any]) -> Iterator[str]:
    listed = [each.split(" -> ") for each in contract.get("ignore_imports", ())]
    for container in contract.get("containers", ("",)):
        prefix = f"{container}." if container else ""
        floor_of = {
            prefix + room.strip(): number
            for number, layer in enumerate(contract["layers"])
            for room in layer.replace(":", "|").split("|")
        }
        floors = {name: _floor(name, floor_of) for name in graph}
        for importer, own in floors.items():
            for each in graph[importer] if own is not None else ():
                floor = floors[each]
                is_upward = floor is not None and own is not None and floor < own
                if is_upward and not _is_listed(importer, each, listed):
                    yield f"{importer} imports {each}, which is above it"


def _is_listed(importer: str, imported: str, listed: list[list[str]]) -> bool:
    return any(fnmatchcase(importer, one) and fnmatchcase(imported, two) for one, two in listed)


def _floor(module: str, floor_of: Mapping[str, int]) -> int | None:
    parts = module.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((floor_of[name] for name in names if name in floor_of), None)

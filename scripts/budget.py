"""The size budget: prints where the code stands and fails where it is over.

Limits are for reading: a file or function that needs more is missing a concept. Raising one is an
ADR. `python scripts/budget.py` prints the table, and below it the goals for the code as a whole
(`size_goals.py`); `--all` lists every file.
"""

import argparse
import ast
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also with an interpreter where the project is not installed
from scripts.import_graph import circles, import_graph, upward  # noqa: E402
from scripts.size_goals import goals, table  # noqa: E402

MAX_MEDIAN_FILE: Final = 140
MAX_P90_FUNCTION: Final = 36
BANNED_NAMES: Final = frozenset(
    f"{name}.py" for name in ("utils", "helpers", "common", "misc", "core", "types", "manager")
)


DIALECT: Final = re.compile(
    r"\b(?:told|who(?:so)?ever|nobody|somebody|anybody|everybody|bears|beside|mended|buried|bury|excused?"
    r"|goes? home|for good|(?<!there )is no (?!longer|more|less|need|way|room|such)\w+)\b",
    re.IGNORECASE,
)
"""Words for which docs/glossary.md or the field has a plainer one."""
ALLOWED_DIALECT: Final = {Path("scripts/budget.py"), Path("scripts/demo_model/smalltalk.py")}
"""This list itself, and sentences that the demo model learns."""
MIN_DOCSTRING_WORDS: Final = 4
FORWARDING_DOCSTRING: Final = re.compile(r"See [\w`.]+\.?\Z")
FRAGMENT: Final = re.compile(r"(?:Whether|What|Of|Which|How)\b")
IN_QUOTES: Final = re.compile(r'"""\s*' + FRAGMENT.pattern)
"""The first word of a docstring that has no subject: it is not a sentence."""


@dataclass(frozen=True)
class Budget:
    """Limits, in lines, for one kind of file."""

    name: str
    max_file: int
    max_function: int


CODE: Final = Budget("code", 400, 50)
KERNEL: Final = Budget("kernel", 400, 120)
TEST: Final = Budget("test", 500, 50)


@dataclass(frozen=True)
class Function:
    """A function or method and its length with decorators and docstring."""

    path: Path
    name: str
    line: int
    lines: int


@dataclass(frozen=True)
class File:
    """A source file, measured."""

    path: Path
    budget: Budget
    lines: int
    functions: list[Function]


def budget_for(path: Path) -> Budget:
    """Return the limits that hold for a path relative to the root."""
    if path.parts[0] == "tests":
        return TEST
    if path.parts[:2] == ("tokenmesh", "kernels"):
        return KERNEL
    return CODE


def measure(path: Path) -> File:
    """Read and measure one file. Raises SyntaxError for a file that does not parse."""
    text = (ROOT / path).read_text(encoding="utf-8")
    functions = [
        Function(path, node.name, node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return File(path, budget_for(path), len(text.splitlines()), functions)


def source_files() -> Iterator[Path]:
    """Every Python file that the budget covers, empty ones left out."""
    for folder in ("tokenmesh", "tests", "scripts", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.stat().st_size > 1:
                yield path.relative_to(ROOT)


def violations(files: list[File]) -> Iterator[str]:
    """One line for everything that is over its limit."""
    for file in files:
        if file.path.name in BANNED_NAMES:
            yield f"{file.path}: a file name that says nothing"
        if file.lines > file.budget.max_file:
            yield f"{file.path}: {file.lines} lines (limit {file.budget.max_file})"
        for function in file.functions:
            if function.lines > file.budget.max_function:
                yield (
                    f"{file.path}:{function.line} {function.name}: {function.lines} lines "
                    f"(limit {file.budget.max_function})"
                )


def dialect(path: Path) -> Iterator[str]:
    """One line for every word of the dialect in a file."""
    for number, line in enumerate((ROOT / path).read_text(encoding="utf-8").splitlines(), 1):
        for found in DIALECT.finditer(line):
            yield f"{path}:{number}: {found.group()!r} is not plain English, see docs/glossary.md"


def documentation() -> Iterator[Path]:
    """Every page but the lab notebook, which is history."""
    for path in sorted(
        [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    ):
        if path.name != "log.md":
            yield path.relative_to(ROOT)


def names_and_docstrings(paths: list[Path]) -> tuple[list[str], list[str]]:
    """A line for each public class name used twice, and for each docstring that says nothing."""
    places = defaultdict(list)
    empty = []
    for path in paths:
        for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{path}:{node.lineno}")
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
                text = ast.get_docstring(node)
                if text and (
                    len(text.split()) < MIN_DOCSTRING_WORDS or FORWARDING_DOCSTRING.match(text)
                ):
                    line = getattr(node, "lineno", 1)
                    empty.append(f"{path}:{line}: the docstring {text!r} says nothing: delete it")
    twice = [
        f"class {name} is defined more than once: {', '.join(where)}"
        for name, where in sorted(places.items())
        if len(where) > 1
    ]
    return twice, empty


def fragments(path: Path) -> Iterator[str]:
    """Yield a line for each docstring, those of fields included, that has no subject."""
    source = (ROOT / path).read_text(encoding="utf-8")
    # Most files need not be parsed.
    for node in ast.walk(ast.parse(source)) if IN_QUOTES.search(source) else ():
        match node:
            case ast.Expr(value=ast.Constant(value=str() as text)) if FRAGMENT.match(text.lstrip()):
                first = text.strip().splitlines()[0]
                yield f"{path}:{node.lineno}: the docstring {first!r} has no subject"


def quantile(values: list[int], share: float) -> int:
    """The value at or below which `share` of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0


def summary(name: str, files: list[File]) -> tuple[str, int, int]:
    """A table row, the median file and the p90 function of one group."""
    lines = [file.lines for file in files]
    functions = [function.lines for file in files for function in file.functions]
    median = int(statistics.median(lines)) if lines else 0
    p90 = quantile(functions, 0.9)
    row = (
        f"{name:<8}{len(files):>6}{sum(lines):>8}   {median:>4} / {quantile(lines, 0.9):>4} / "
        f"{max(lines, default=0):>4}   {quantile(functions, 0.5):>4} / {p90:>4} / "
        f"{max(functions, default=0):>4}"
    )
    return row, median, p90


def main() -> int:
    """Print the table; 1 when anything is over budget."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="list every file")
    arguments = parser.parse_args()
    files = [measure(path) for path in source_files()]
    if arguments.all:
        for file in sorted(files, key=lambda file: -file.lines):
            print(f"{file.lines:>5}  {file.path}")
    print(f"{'':<8}{'files':>6}{'lines':>8}   file med / p90 / max   fn med / p90 / max")
    problems = list(violations(files))
    for kind in (CODE, KERNEL, TEST):
        group = [file for file in files if file.budget is kind]
        row, median, p90 = summary(kind.name, group)
        print(row)
        if kind is CODE and median > MAX_MEDIAN_FILE:
            problems.append(f"median file is {median} lines (limit {MAX_MEDIAN_FILE})")
        if kind is CODE and p90 > MAX_P90_FUNCTION:
            problems.append(f"p90 function is {p90} lines (limit {MAX_P90_FUNCTION})")
    package = {file.path: file.lines for file in files if file.path.parts[0] == "tokenmesh"}
    twice, empty = names_and_docstrings([*package])
    print(table([*goals(package, len(twice), len(empty))]))
    found = [line for file in files for line in fragments(file.path)]
    print(f"  docstrings without a subject: {len(found)}")
    problems += [*empty, *twice, *found]
    graph = import_graph()
    round_trips, risers = circles(graph), upward(graph)
    print(f"  circles of imports: {len(round_trips)}; imports to a higher floor: {len(risers)}")
    problems += [f"a circle of imports: {', '.join(each)}" for each in round_trips] + risers
    for path in [*(file.path for file in files), *documentation()]:
        if path not in ALLOWED_DIALECT:
            problems += dialect(path)
    for problem in problems:
        print(f"over budget: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

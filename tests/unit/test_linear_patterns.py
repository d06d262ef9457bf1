"""No regular expression takes time that grows faster than the text: clients choose the text.

Every pattern of the package is found by importing the modules that compile one: a new one, too.
"""

import importlib
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final

import pytest

import tokenmesh
from tokenmesh.services.gateway.apis.table import APIS
from tokenmesh.services.gateway.core.api_table import ApiTable
from tokenmesh.services.gateway.parsers.markers import Markers

ROOT: Final = Path(tokenmesh.__file__).parent
SMALL: Final = 500
SUSPICIOUS_S: Final = 0.002
"""The least CPU time of eight times as much text where a pattern is quadratic."""
OWN_TEXT: Final = {"kernels", "models"}
"""Folders whose patterns read sources and names of a checkpoint, never a client's text."""
SEARCHING: Final = ("search", "finditer", "findall", "sub", "split")
CHARS: Final = " a1_-.\"'\\{[(<,:/=\n"


def _modules() -> Iterator[tuple[str, str]]:
    """Names and sources of those that compile a pattern."""
    for file in sorted(ROOT.rglob("*.py")):
        source = file.read_text()
        if "re.compile(" in source and not OWN_TEXT & set(file.parts):
            yield ".".join(file.relative_to(ROOT.parent).with_suffix("").parts), source


def _patterns() -> Iterator[tuple[str, re.Pattern[Any], bool]]:
    """Each with whether it is searched for, instead of matched where one stands."""
    for name, source in _modules():
        module = importlib.import_module(name.removesuffix(".__init__"))
        for key, value in vars(module).items():
            is_search = any(f"{key}.{method}(" in source for method in SEARCHING)
            named = value.items() if isinstance(value, dict) else [("", value)]
            for suffix, each in named:
                if isinstance(each, re.Pattern):
                    yield f"{name}.{key}{suffix}", each, is_search
    markers = Markers("<tool_call>", "</tool_call>", "<|a|>")
    yield "markers._whole", markers._whole, True
    yield "markers._any", markers._any, True
    for method, pattern in sorted(ApiTable(APIS)._exempt.items()):
        yield f"exempt.{method}", pattern, False


PATTERNS: Final = list(_patterns())


def test_all_patterns_are_found() -> None:
    assert len(PATTERNS) > 35
    compiled = sum(source.count("re.compile(") for _, source in _modules())
    assert len(PATTERNS) >= compiled - 3


def _texts(pattern: re.Pattern[Any]) -> Iterator[Callable[[int], Any]]:
    """Ways to make a text of a length: a beginning and a piece many times."""
    written = pattern.pattern if isinstance(pattern.pattern, str) else pattern.pattern.decode()
    plain = re.sub(r"\\(.)", r"\1", written)
    words = set(re.findall(r"[\w<>=|\[\]{}\"']{2,24}", plain)) | set(re.findall(r"\w+\W", plain))
    chars = sorted({*CHARS, *(each for each in plain if each.isprintable())})[:28]
    for begun, piece in product(["", *chars, *sorted(words)[:12]], [*chars, *sorted(words)[:4]]):

        def make(length: int, begun: str = begun, piece: str = piece) -> Any:
            text = begun + piece * (length // len(piece))
            return text if isinstance(pattern.pattern, str) else text.encode()

        yield make


def _run_s(pattern: re.Pattern[Any], text: Any, is_search: bool) -> float:
    began_s = time.process_time()
    if is_search:
        for _ in pattern.finditer(text):
            pass
    else:
        pattern.match(text)
        pattern.fullmatch(text)
    return time.process_time() - began_s


def _is_linear(run_s: Callable[[Any], float], make: Callable[[int], Any]) -> bool:
    """Eight times the text takes eight times as long, or 64 times where it is quadratic."""
    if run_s(make(8 * SMALL)) < SUSPICIOUS_S:
        return True
    small, large = make(SMALL), make(8 * SMALL)
    best_s = min(run_s(large) for _ in range(3))
    return best_s < SUSPICIOUS_S or best_s < 24 * min(run_s(small) for _ in range(3))


@pytest.mark.parametrize(
    ("pattern", "is_search"), [each[1:] for each in PATTERNS], ids=[each[0] for each in PATTERNS]
)
def test_the_time_of_a_pattern_grows_with_the_text(
    pattern: re.Pattern[Any], is_search: bool
) -> None:
    run_s = partial(_run_s, pattern, is_search=is_search)
    slow = (make(20) for make in _texts(pattern) if not _is_linear(run_s, make))
    assert next(slow, None) is None


def test_a_quadratic_pattern_is_found() -> None:
    """Find the former pattern of structured output's guard."""
    pattern = re.compile(r"\{(\d*)(,?)(\d*)\}")
    run_s = partial(_run_s, pattern, is_search=False)
    assert not all(_is_linear(run_s, make) for make in _texts(pattern))

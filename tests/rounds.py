"""Tests with many values: some of them run in `make test`, all of them in `make test-long`."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def rounds(name: str, short: int, total: int) -> pytest.MarkDecorator:
    """Parametrize `name` with range(total), of which `make test` runs the first `short`."""
    marks = (() if number < short else pytest.mark.slow for number in range(total))
    values = [pytest.param(number, marks=mark) for number, mark in enumerate(marks)]
    return pytest.mark.parametrize(name, values)


def counts(name: str, short: int, long: int) -> pytest.MarkDecorator:
    """Parametrize `name` with a count for `make test` and one for `make test-long`."""
    values: list[Any] = [short, pytest.param(long, marks=pytest.mark.slow)]
    return pytest.mark.parametrize(name, values)


def some(values: Iterable[str], quick: Collection[str], name: str = "name") -> pytest.MarkDecorator:
    """Parametrize `name`; values that are not in `quick` are left to `make test-long`."""
    marks = ((each, () if each in quick else pytest.mark.slow) for each in values)
    return pytest.mark.parametrize(name, [pytest.param(each, marks=mark) for each, mark in marks])

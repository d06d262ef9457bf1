"""Traces in Mooncake's format: JSON lines of timestamp (ms), input_length, output_length, hash_ids.

A hash id stands for a block of 512 tokens; equal ids mean equal tokens, and what came before them.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Final

import msgspec

BLOCK_TOKENS: Final = 512


class Entry(msgspec.Struct, frozen=True):
    """One request of a trace."""

    timestamp: float
    """Milliseconds from the trace's start."""
    input_length: int
    output_length: int
    hash_ids: list[int]

    @property
    def at_s(self) -> float:
        """When it arrives."""
        return self.timestamp / 1e3


def read_trace(path: Path, limit: int | None = None, until_s: float | None = None) -> list[Entry]:
    """The first entries, in order of time. Raises ValueError that names the line."""
    entries: list[Entry] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if limit is not None and len(entries) >= limit:
                break
            if line.strip():
                entries.append(_entry(line, f"{path.name}, line {number}"))
            if until_s is not None and entries and entries[-1].at_s > until_s:
                entries.pop()
                break
    return sorted(entries, key=lambda entry: entry.timestamp)


def _entry(line: bytes, where: str) -> Entry:
    try:
        entry = msgspec.json.decode(line, type=Entry, strict=False)
    except msgspec.DecodeError as error:
        raise ValueError(f"{where}: {error}") from error
    if entry.timestamp < 0 or entry.input_length < 1 or entry.output_length < 0:
        raise ValueError(f"{where}: a number is below its least")
    if len(entry.hash_ids) * BLOCK_TOKENS < entry.input_length:
        raise ValueError(f"{where}: {len(entry.hash_ids)} blocks for {entry.input_length} tokens")
    return entry


def make_trace(count: int, rate: float, seed: int, turns: int = 4, blocks: int = 4) -> list[Entry]:
    """Conversations that share a system prompt of two blocks; a turn adds `blocks` or fewer."""
    return sorted(_talks(count, rate, Random(seed), turns, blocks), key=lambda each: each.timestamp)


def _talks(count: int, rate: float, random: Random, turns: int, blocks: int) -> Iterator[Entry]:
    next_id, open_talks = 2, [[0, 1]]
    at_ms = 0.0
    for _ in range(count):
        at_ms += random.expovariate(rate) * 1e3
        if random.random() < 1 / turns:
            open_talks.append([0, 1])
        talk = random.choice(open_talks)
        added = random.randint(1, blocks)
        talk += range(next_id, next_id + added)
        next_id += added
        length = len(talk) * BLOCK_TOKENS - random.randrange(BLOCK_TOKENS)
        yield Entry(round(at_ms), length, random.randint(1, 64), list(talk))
        if len(talk) > turns * blocks:
            open_talks.remove(talk)
            open_talks = open_talks or [[0, 1]]


def most_cached(entries: Iterable[Entry]) -> float:
    """The share of prompt tokens that a cache without end would hold: no policy gets more."""
    seen: set[int] = set()
    total = cached = 0
    for entry in entries:
        total += entry.input_length
        known = 0
        for each in entry.hash_ids:
            if each not in seen:
                break
            known += 1
        cached += min(known * BLOCK_TOKENS, entry.input_length - 1)
        seen.update(entry.hash_ids)
    return cached / max(1, total)

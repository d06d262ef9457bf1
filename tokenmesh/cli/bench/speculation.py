"""Speculation: what a server's counters say of the drafts of a run, in vLLM's words."""

import re
from collections import Counter
from typing import Final, TypedDict

from tokenmesh.cli.bench.client import Target

_COUNTER: Final = re.compile(
    r"^(?:tokenmesh|vllm):spec_decode_(num_drafts|num_draft_tokens|num_accepted_tokens"
    r'|num_accepted_tokens_per_pos)_total(?:\{(?:.*\bposition="(\d+)")?.*\})? ([0-9.eE+]+)$',
    re.MULTILINE,
)
_MOST_PLACES: Final = 64


class Speculation(TypedDict):
    """The drafts of a run; names are those of `vllm bench serve`."""

    spec_decode_acceptance_rate: float
    """Accepted tokens for each one drafted, percent."""
    spec_decode_acceptance_length: float
    """Tokens of a step with drafts, the one that would come without them included."""
    spec_decode_num_drafts: int
    spec_decode_draft_tokens: int
    spec_decode_accepted_tokens: int
    spec_decode_per_position_acceptance_rates: list[float]


class DraftCounters:
    """The counters of drafts on a server's metrics page, over all its workers."""

    def __init__(self, server: Target) -> None:
        self._server = server
        self._before: Counter[tuple[str, int]] = Counter()

    async def begin(self) -> None:
        """Count from now on. A server that shows no metrics counts nothing."""
        self._before = await self._read()

    async def found(self) -> Speculation | None:
        """Return what was drafted since; None: nothing was, or the server does not say."""
        now = await self._read()
        now.subtract(self._before)
        drafts = now["num_drafts", 0]
        if drafts <= 0:
            return None
        tokens, accepted = now["num_draft_tokens", 0], now["num_accepted_tokens", 0]
        places = [now["num_accepted_tokens_per_pos", place] for place in range(_MOST_PLACES)]
        while places and not places[-1]:
            places.pop()
        return Speculation(
            spec_decode_acceptance_rate=round(100 * accepted / max(1, tokens), 2),
            spec_decode_acceptance_length=round(1 + accepted / drafts, 3),
            spec_decode_num_drafts=drafts,
            spec_decode_draft_tokens=tokens,
            spec_decode_accepted_tokens=accepted,
            spec_decode_per_position_acceptance_rates=[round(each / drafts, 4) for each in places],
        )

    async def _read(self) -> Counter[tuple[str, int]]:
        try:
            page = (await self._server.fetch("GET", "/metrics")).decode()
        except (OSError, ValueError):
            return Counter()
        counts: Counter[tuple[str, int]] = Counter()
        for name, place, value in _COUNTER.findall(page):
            counts[name, int(place or 0)] += int(float(value))
        return counts

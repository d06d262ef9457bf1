"""TenantTexts: what a tenant's streams wrote lately, for the drafts of its other streams."""

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Final

from tokenmesh.engine.speculate.indexed_text import IndexedText, Match

MAX_TOKENS: Final = 1 << 17
"""One tenant has at most so many. The older half is forgotten when the younger one is full."""
MAX_BYTES: Final = 64 << 20
"""The indexes of all tenants take at most so many; beyond, the tenant is forgotten that was here
longest ago."""
_SEPARATOR: Final = -1
"""Between two pieces of text; no draft goes on beyond it."""


class _Texts:
    """Pieces of text one after the other, in two halves."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = lengths
        self._old = IndexedText(array("i"), lengths)
        self._young = IndexedText(array("i"), lengths)
        self._num_pieces = 0
        """The younger half has so many."""

    @property
    def num_bytes(self) -> int:
        return self._old.num_bytes + self._young.num_bytes

    def add(self, piece: Sequence[int], max_pieces: int) -> None:
        """At most `MAX_TOKENS` / 2 tokens."""
        ids = self._young.ids
        if len(ids) + len(piece) >= MAX_TOKENS // 2 or 2 * self._num_pieces >= max_pieces:
            self._old, self._num_pieces = self._young, 0
            self._young = IndexedText(ids := array("i"), self._lengths)
        assert isinstance(ids, array)
        ids.extend(piece)
        ids.append(_SEPARATOR)
        self._num_pieces += 1
        while not self._young.update():
            pass

    def find(self, tail: "array[int]", most: int) -> tuple[IndexedText, Match] | None:
        for text in (self._young, self._old):
            match = text.find(tail, most)
            if match is not None:
                return text, match
        return None


class TenantTexts:
    """By tenant and cache salt, so that no one's text decides how fast another's stream is."""

    def __init__(self, lengths: Sequence[int], max_pieces: int) -> None:
        """`max_pieces`: of one tenant."""
        self._lengths = lengths
        self._max_pieces = max_pieces
        self._by_tenant: OrderedDict[Hashable, _Texts] = OrderedDict()
        self.num_bytes = 0

    def add(self, tenant: Hashable, piece: Sequence[int]) -> None:
        """Remember a piece of a stream; of a long one the end."""
        if not self._max_pieces or len(piece) <= min(self._lengths):
            return
        texts = self._by_tenant.pop(tenant, None) or _Texts(self._lengths)
        self._by_tenant[tenant] = texts
        before = texts.num_bytes
        texts.add(piece[-MAX_TOKENS // 4 :], self._max_pieces)
        self.num_bytes += texts.num_bytes - before
        while self.num_bytes > MAX_BYTES and len(self._by_tenant) > 1:
            self.num_bytes -= self._by_tenant.popitem(last=False)[1].num_bytes

    def offer(
        self, tenant: Hashable, text: Sequence[int], most: int, limit: int
    ) -> tuple[Match, list[int]] | None:
        """The longest match with the end of a text, up to `most` tokens, and what followed it."""
        texts = self._by_tenant.get(tenant)
        found = texts and texts.find(array("i", text[-most:]), most)
        if not found:
            return None
        owner, match = found
        ids = list(owner.ids[match.end : match.end + limit])
        if _SEPARATOR in ids:
            del ids[ids.index(_SEPARATOR) :]
        return (match, ids) if ids else None

"""Know which draws may end a stream."""

from collections.abc import Collection, Sequence

from tokenmesh.engine.request.request import Request


class EndDetector:
    """Finds draws that may end a stream, without visiting each stream. May find too many rows,
    never too few."""

    def __init__(self) -> None:
        self._num_stopped_by: dict[int, int] = {}
        """A token id leads to the number of streams that it may stop."""
        self._rows: set[int] = set()
        """These rows may end with any draw."""

    def join(self, request: Request) -> None:
        """A request has got a row."""
        counts = self._num_stopped_by
        for token in request.spec.stop_ids:
            counts[token] = counts.get(token, 0) + 1
        if request.spec.sampling.repetition is not None:
            self._rows.add(request.place.row)

    def leave(self, request: Request) -> None:
        """It is about to lose the row."""
        counts = self._num_stopped_by
        for token in request.spec.stop_ids:
            counts[token] -= 1
            if not counts[token]:
                del counts[token]
        self._rows.discard(request.place.row)

    def expect_end(self, request: Request) -> None:
        """Note that the request reaches its greatest length with its next token."""
        self._rows.add(request.place.row)

    def rows(self, rows: Collection[int], ids: Sequence[int]) -> set[int]:
        """Return the rows that may be at their end, one of these tokens drawn by each of `rows`."""
        found = {row for row in self._rows if row in rows} if self._rows else set()
        stops = self._num_stopped_by
        if not stops.keys().isdisjoint(ids):
            found.update(row for row, token in zip(rows, ids, strict=True) if token in stops)
        return found

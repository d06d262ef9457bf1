"""LookupProposer: drafts from what followed the same tokens earlier, and how many of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from sys import maxsize
from typing import Final, NamedTuple

from tokenmesh.engine.request.request import Request
from tokenmesh.engine.speculate.adaptive import (
    Acceptance,
    Rates,
    StepCost,
    choose,
    strength_of,
    survivals,
)
from tokenmesh.engine.speculate.indexed_text import IndexedText, Match
from tokenmesh.engine.speculate.prediction import Prediction
from tokenmesh.engine.speculate.tenant_texts import TenantTexts
from tokenmesh.shared.config.speculative import SpeculativeConfig

MAX_BYTES: Final = 256 << 20
"""The indexes of all rows take at most so many; a row whose text does not fit has no drafts."""
_COMPARED: Final = 24
"""Tokens of a match beyond which it is as good as any."""
_SUFFIX_LENGTHS: Final = (2, 4, 8)
_IDLE_TOKENS: Final = 8
"""A row without a draft for so many tokens rests."""
_REST_TOKENS: Final = 8
"""For so many; then it is looked at what drafts would have been right."""
_PIECE_TOKENS: Final = 256
"""A running stream's output is other streams' to look up as soon as there is so much."""


class Continuation(NamedTuple):
    """It holds what may follow the first `start` tokens of a stream."""

    start: int
    strength: int
    token_ids: list[int]


@dataclass(slots=True)
class RowDrafts:
    """It holds what the proposer knows of one stream."""

    text: IndexedText | None
    """None: there is no memory for it, or it is not looked through."""
    prediction: Prediction | None
    acceptance: Acceptance
    """Where its rates began."""
    rates: Rates
    num_bytes: int = 0
    offer: Continuation | None = None
    """The last one: the stream's tokens show later how right it was, drafted or not."""
    last_drafted: int = 0
    """Known tokens when it last had drafts, or began to be asked for some."""
    awake_at: int = 0
    """A row that rests is looked at with so many known tokens; 0: it does not rest."""
    num_shared: int = 0
    """Tokens that other streams of the tenant can look up."""


class LookupProposer:
    """Implements `Proposer`. A row that rests decodes like one without drafts, and its drafts are
    compared with what it draws without being computed.

    A request's own prediction comes first. Without a method nothing else is looked up.
    """

    def __init__(self, config: SpeculativeConfig, max_rows: int = maxsize) -> None:
        self.max_rows = max_rows
        self.max_drafts = config.max_drafts
        self.only_predicted = config.method is None
        self._is_suffix = config.method == "suffix"
        least, most = config.lookup
        self._lengths = _SUFFIX_LENGTHS if self._is_suffix else range(least, most + 1)
        self._most = config.suffix_decoding_max_tree_depth if self._is_suffix else _COMPARED
        self._factor = config.suffix_decoding_max_spec_factor if self._is_suffix else float(maxsize)
        pieces = config.suffix_decoding_max_cached_requests if self._is_suffix else 0
        self._tenants = TenantTexts(self._lengths, pieces)
        self._acceptance = Acceptance()
        self._predicted = Acceptance()
        """It counts the drafts of requests with a prediction."""
        self._cost = StepCost()
        self._num_rows = 1
        """The last step had so many."""
        self._row_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Return what all indexes take."""
        return self._row_bytes + self._tenants.num_bytes

    def wants(self, request: Request) -> bool:
        if self.only_predicted and not request.spec.prediction:
            return False
        row = _known(request)
        if row is None or not row.awake_at:
            return True
        if row.awake_at > request.num_known:
            return False
        self._learn(row, request)
        row.offer = self._look_up(row, request)
        if row.offer is not None:
            kept = survivals(row.rates, row.offer.strength, len(row.offer.token_ids))
            if choose(self._cost, self._num_rows, [kept])[0]:
                row.awake_at, row.last_drafted = 0, request.num_known
                return True
        row.awake_at = request.num_known + _REST_TOKENS
        return False

    def propose(self, rows: Sequence[tuple[Request, int]], num_rows: int) -> list[list[int]]:
        self._num_rows = num_rows
        offers, kept = [], []
        for request, limit in rows:
            row = self._row_of(request)
            self._learn(row, request)
            row.offer = offer = self._look_up(row, request)
            drafts = offer.token_ids[:limit] if offer is not None else []
            offers.append((request, row, drafts))
            kept.append(survivals(row.rates, offer.strength, len(drafts)) if offer else [])
        chosen = []
        for (request, row, drafts), length in zip(
            offers, choose(self._cost, num_rows, kept), strict=True
        ):
            chosen.append(drafts[:length])
            if length:
                row.last_drafted = request.num_known
            elif request.num_known - row.last_drafted >= _IDLE_TOKENS:
                row.awake_at = request.num_known + _REST_TOKENS
        return chosen

    def note_step(self, num_rows: int, num_drafts: int, duration_s: float) -> None:
        self._cost.note(num_rows, num_drafts, duration_s)

    def forget(self, request: Request) -> None:
        row = _known(request)
        if row is not None:
            self._share(row, request)
            self._row_bytes -= row.num_bytes
            request.drafting = None

    def _row_of(self, request: Request) -> RowDrafts:
        row = _known(request)
        if row is None:
            text, prediction, acceptance = None, None, self._acceptance
            if not self.only_predicted:
                text = IndexedText(request.token_ids, self._lengths)
            if request.spec.prediction:
                prediction = Prediction(request.spec.prediction, request.num_prompt)
                acceptance = self._predicted
            row = RowDrafts(text, prediction, acceptance, acceptance.of_row())
            row.last_drafted, row.num_shared = request.num_known, request.num_prompt
            request.drafting = row
        return row

    def _learn(self, row: RowDrafts, request: Request) -> None:
        """Compare the last offer with what the stream drew."""
        if row.offer is None:
            return
        start, strength, offered = row.offer
        drawn = request.token_ids[start : start + len(offered)]
        num_right = 0
        for token, wanted in zip(offered, drawn, strict=False):
            if token != wanted:
                break
            num_right += 1
        ended_wrong = num_right < len(drawn)
        row.acceptance.note(row.rates, strength, num_right, ended_wrong=ended_wrong)
        row.offer = None

    def _look_up(self, row: RowDrafts, request: Request) -> Continuation | None:
        if request.num_known - row.num_shared >= _PIECE_TOKENS:
            self._share(row, request)
        is_complete, found = self._update(row), None
        if row.prediction is not None:
            predicted = row.prediction.offer(request.token_ids, self.max_drafts)
            if predicted is not None:
                return Continuation(request.num_known, strength_of(predicted[0]), predicted[1])
        if row.text is not None and is_complete:
            found = row.text.find(request.token_ids, self._most)
        length = found.length if found is not None else 0
        if self._is_suffix and length < self._most:
            tenant = _tenant_of(request)
            other = self._tenants.offer(tenant, request.token_ids, self._most, self.max_drafts)
            if other is not None and other[0].length > length:
                return self._offer(request, *other)
        if row.text is None or found is None:
            return None
        return self._offer(request, found, row.text.after(found.end, self.max_drafts))

    def _offer(self, request: Request, match: Match, token_ids: list[int]) -> Continuation | None:
        most = max(1, int(self._factor * match.length))
        if not token_ids:
            return None
        return Continuation(request.num_known, strength_of(match), token_ids[:most])

    def _update(self, row: RowDrafts) -> bool:
        """Index what the stream drew; whether its text can be looked through."""
        is_complete = row.text is not None and row.text.update()
        self._row_bytes -= row.num_bytes
        row.num_bytes = 0 if row.text is None else row.text.num_bytes
        if row.prediction is not None:
            row.num_bytes += row.prediction.num_bytes
        if self._row_bytes + row.num_bytes > MAX_BYTES:
            row.text, row.prediction, row.num_bytes = None, None, 0
            return False
        self._row_bytes += row.num_bytes
        return is_complete

    def _share(self, row: RowDrafts, request: Request) -> None:
        """Let other streams of the tenant look up what the stream drew since it did so last."""
        if self._is_suffix and request.num_known > row.num_shared:
            first = max(0, row.num_shared - max(self._lengths))
            self._tenants.add(_tenant_of(request), request.token_ids[first:])
            row.num_shared = request.num_known


def _known(request: Request) -> RowDrafts | None:
    row = request.drafting
    assert row is None or isinstance(row, RowDrafts)
    return row


def _tenant_of(request: Request) -> tuple[str, str | None]:
    """Whose texts a stream may look up."""
    return request.spec.owner.tenant, request.spec.cache_salt

"""Session: which tokens of a stream have arrived, and which attempt counts.

No I/O and no clock. A token is accepted once, in order of its position, and only from the current
attempt; everything else is dropped.
"""

from enum import Enum
from math import inf
from typing import Final

from tokenmesh.services.gateway.core.generation.chunk import Output
from tokenmesh.shared.config.calls import LivenessSettings
from tokenmesh.shared.errors import Draining, KvSourceFailed, ProtocolError, TokenMeshError
from tokenmesh.shared.ids import WorkerId
from tokenmesh.shared.messages.failed import from_failed
from tokenmesh.shared.messages.tokens import Delta
from tokenmesh.shared.tokens import unpack_ids

_REQUEST_MAY_CAUSE: Final = frozenset({"worker gone", "broken off"})
"""Kinds of loss that a request itself may cause: it can crash a worker, but not freeze it."""


class SessionState(Enum):
    PLACING = "placing"
    """No worker runs the stream (yet, or any more)."""
    RUNNING = "running"
    ENDED = "ended"


class Session:
    """The state machine of one stream."""

    __slots__ = (
        "_gap_seen",
        "_num_lost_at",
        "_pause_s",
        "_requested_s",
        "_settings",
        "attempt",
        "drafts",
        "earlier_drafts",
        "epoch",
        "lost_because",
        "lost_kind",
        "lost_source",
        "num_fruitless",
        "state",
        "token_ids",
        "worker_id",
    )

    def __init__(self, settings: LivenessSettings) -> None:
        self._settings = settings
        self.state = SessionState.PLACING
        self.attempt = 0
        self.worker_id: WorkerId | None = None
        self.epoch = 0
        self.token_ids: list[int] = []
        """Accepted output of all attempts."""
        self.drafts: tuple[int, int] | None = None
        """See `Delta.drafts`, of all attempts as far as they were heard of."""
        self.earlier_drafts: tuple[int, int] | None = None
        self.lost_kind = ""
        self.lost_because = ""
        """Why the last worker lost the stream."""
        self.lost_source = ""
        """The worker that is to blame, where it is another one."""
        self.num_fruitless = 0
        """Workers in a row that crashed or failed before the stream's next token."""
        self._num_lost_at = -1
        self._gap_seen = False
        self._requested_s = 0.0
        """When the last token arrived or the last Resend was sent."""
        self._pause_s = settings.stall_s

    def start(self, worker_id: WorkerId, epoch: int, now: float) -> None:
        """The current attempt is sent to a worker; its tokens are accepted from now on."""
        self.state = SessionState.RUNNING
        self.worker_id = worker_id
        self.epoch = epoch
        self._gap_seen = False
        self._requested_s = now
        self._pause_s = self._settings.stall_s

    def lose(self, kind: str, reason: str, source: str = "") -> None:
        """The worker lost the stream: the next attempt needs a placement.

        `kind`: a label of the metric `recoveries`.
        """
        assert self.state is not SessionState.ENDED
        self.state = SessionState.PLACING
        self.attempt += 1
        self.earlier_drafts = self.drafts
        if len(self.token_ids) > self._num_lost_at:
            self.num_fruitless = 0
        self._num_lost_at = len(self.token_ids)
        self.num_fruitless += kind in _REQUEST_MAY_CAUSE
        self.lost_kind = kind
        self.lost_because = reason
        self.lost_source = source

    def end(self) -> None:
        """Accept no more tokens."""
        self.state = SessionState.ENDED

    def take(self, delta: Delta, now: float) -> Output | None:
        """The new part of `delta`; None if there is none.

        An attempt that its worker aborted moves the session to PLACING instead.
        """
        if self.state is not SessionState.RUNNING or delta.attempt != self.attempt:
            return None
        num_known = len(self.token_ids)
        num_seen = num_known - delta.offset
        if num_seen < 0:
            if not self._gap_seen:
                self._gap_seen = True
                self._requested_s = -inf
            return None
        token_ids = unpack_ids(delta.token_ids)
        if num_seen > len(token_ids):
            return None
        if num_seen == len(token_ids) and delta.finish is None:
            return None
        self._requested_s = now
        self._pause_s = self._settings.stall_s
        self._gap_seen = False
        return self._accept(delta, token_ids[num_seen:] if num_seen else token_ids, num_seen)

    def _accept(self, delta: Delta, token_ids: list[int], num_seen: int) -> Output | None:
        if delta.drafts is not None:
            drafted, accepted = self.earlier_drafts or (0, 0)
            self.drafts = drafted + delta.drafts[0], accepted + delta.drafts[1]
        error = None
        if delta.error is not None or delta.logprobs is not None or delta.finish is not None:
            error = _failure(delta, num_seen + len(token_ids))
        if error is not None and delta.finish is None:
            self.end()
        if delta.finish is not None:
            if delta.finish == "abort" or (error is not None and error.retryable):
                kind, source = "broken off", ""
                if isinstance(error, Draining):
                    kind = "draining"
                elif isinstance(error, KvSourceFailed):
                    kind, source = "kv source", error.source
                self.lose(kind, error.message if error is not None else "aborted", source)
                return None
            self.end()
        self.token_ids.extend(token_ids)
        logprobs = delta.logprobs
        return Output(
            token_ids=token_ids,
            logprobs=logprobs[num_seen:] if logprobs and num_seen else logprobs,
            finish=delta.finish,
            stop_token=delta.stop_token,
            cached_tokens=delta.cached_tokens,
            prompt_logprobs=delta.prompt_logprobs,
            error=error,
            alignment=delta.alignment,
            drafts=self.drafts,
        )

    def needs_resend(self, now: float) -> bool:
        """Return whether to request all tokens from position `len(token_ids)` on from the worker
        again.

        After a gap True at once and then every `resend_interval_s`; in silence after `stall_s`,
        then at doubled intervals.
        """
        if self.state is not SessionState.RUNNING:
            return False
        pause_s = self._settings.resend_interval_s if self._gap_seen else self._pause_s
        if now - self._requested_s < pause_s:
            return False
        self._requested_s = now
        if not self._gap_seen:
            self._pause_s = min(self._pause_s * 2, self._settings.stall_max_s)
        return True


def _failure(delta: Delta, num_tokens: int) -> TokenMeshError | None:
    if delta.error is not None:
        return from_failed(delta.error)
    if delta.logprobs is not None and len(delta.logprobs) != num_tokens:
        return ProtocolError(f"{len(delta.logprobs)} logprobs for {num_tokens} tokens")
    if delta.finish == "error":
        return TokenMeshError("the worker failed without a reason")
    return None

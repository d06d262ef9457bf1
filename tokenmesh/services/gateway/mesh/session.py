"""Session: one stream's numbers. Which tokens it has, what is missing, which attempt counts.

No I/O and no clock of its own. Output positions decide everything: a token is taken once, in
order, from the current attempt only; whatever else arrives is dropped.
"""

from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import Final

from tokenmesh.services.gateway.mesh.watch_times import WatchTimes
from tokenmesh.shared.errors import Draining, ProtocolError, TokenMeshError
from tokenmesh.shared.ids import WorkerId
from tokenmesh.shared.messages.failed import from_failed
from tokenmesh.shared.messages.tokens import Delta, FinishReason, TokenLogprobs
from tokenmesh.shared.tokens import unpack_ids

_MAYBE_ITS_FAULT: Final = frozenset({"worker gone", "broken off"})
"""A request can kill a worker or make it fail; it cannot freeze it, or make it leave."""


class SessionState(Enum):
    """Where a stream is."""

    PLACING = "placing"
    """No worker has it (yet, or any more)."""
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True)
class Output:
    """What a delta brought that was not there before."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish: FinishReason | None = None
    stop_token: int | None = None
    cached_tokens: int | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: TokenMeshError | None = None
    """The stream ends without an answer."""


class Session:
    """The state machine of one stream."""

    __slots__ = (
        "_asked_s",
        "_gap_seen",
        "_num_lost_at",
        "_pause_s",
        "_times",
        "attempt",
        "epoch",
        "lost_because",
        "lost_kind",
        "num_fruitless",
        "state",
        "token_ids",
        "worker_id",
    )

    def __init__(self, times: WatchTimes) -> None:
        self._times = times
        self.state = SessionState.PLACING
        self.attempt = 0
        self.worker_id: WorkerId | None = None
        self.epoch = 0
        self.token_ids: list[int] = []
        """Delivered output, over all attempts."""
        self.lost_kind = ""
        self.lost_because = ""
        """Why the last worker no longer counts."""
        self.num_fruitless = 0
        """Workers in a row that died or failed before the stream's next token."""
        self._num_lost_at = -1
        self._gap_seen = False
        self._asked_s = 0.0
        """When the last token came or the last question was put."""
        self._pause_s = times.stall_s

    def start(self, worker_id: WorkerId, epoch: int, now: float) -> None:
        """The current attempt was given to a worker; its tokens count from now on."""
        self.state = SessionState.RUNNING
        self.worker_id = worker_id
        self.epoch = epoch
        self._gap_seen = False
        self._asked_s = now
        self._pause_s = self._times.stall_s

    def lose(self, kind: str, reason: str) -> None:
        """The worker failed: its attempt counts no more, the next one needs a place.

        `kind` is one of a few words, for metrics.
        """
        assert self.state is not SessionState.ENDED
        self.state = SessionState.PLACING
        self.attempt += 1
        if len(self.token_ids) > self._num_lost_at:
            self.num_fruitless = 0
        self._num_lost_at = len(self.token_ids)
        self.num_fruitless += kind in _MAYBE_ITS_FAULT
        self.lost_kind = kind
        self.lost_because = reason

    def end(self) -> None:
        """Take nothing any more."""
        self.state = SessionState.ENDED

    def take(self, delta: Delta, now: float) -> Output | None:
        """What is new in `delta`; None when nothing is.

        An attempt that its worker broke off moves the session to PLACING instead.
        """
        if self.state is not SessionState.RUNNING or delta.attempt != self.attempt:
            return None
        num_known = len(self.token_ids)
        num_seen = num_known - delta.offset
        if num_seen < 0:
            if not self._gap_seen:
                self._gap_seen = True
                self._asked_s = -inf
            return None
        token_ids = unpack_ids(delta.token_ids)
        if num_seen > len(token_ids):
            return None
        if num_seen == len(token_ids) and delta.finish is None:
            return None
        self._asked_s = now
        self._pause_s = self._times.stall_s
        self._gap_seen = False
        return self._accept(delta, token_ids[num_seen:] if num_seen else token_ids, num_seen)

    def _accept(self, delta: Delta, token_ids: list[int], num_seen: int) -> Output | None:
        error = _failure(delta, num_seen + len(token_ids))
        if error is not None and delta.finish is None:
            self.end()
        if delta.finish is not None:
            if delta.finish == "abort" or (error is not None and error.retryable):
                kind = "draining" if isinstance(error, Draining) else "broken off"
                self.lose(kind, error.message if error is not None else "aborted")
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
        )

    def wants_resend(self, now: float) -> bool:
        """Whether the worker should be asked for everything from `len(token_ids)` on.

        True once a time: after a gap at once and then every `resend_interval_s`, in silence
        after `stall_s` and then less and less often.
        """
        if self.state is not SessionState.RUNNING:
            return False
        pause_s = self._times.resend_interval_s if self._gap_seen else self._pause_s
        if now - self._asked_s < pause_s:
            return False
        self._asked_s = now
        if not self._gap_seen:
            self._pause_s = min(self._pause_s * 2, self._times.stall_max_s)
        return True


def _failure(delta: Delta, num_tokens: int) -> TokenMeshError | None:
    if delta.error is not None:
        return from_failed(delta.error)
    if delta.logprobs is not None and len(delta.logprobs) != num_tokens:
        return ProtocolError(f"{len(delta.logprobs)} logprobs for {num_tokens} tokens")
    if delta.finish == "error":
        return TokenMeshError("the worker failed and did not say why")
    return None

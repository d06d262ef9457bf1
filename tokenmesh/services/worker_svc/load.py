"""LoadBook: how busy the worker is, as the event loop knows it; whether it accepts a stream.

The engine's numbers are those of its last step; requests submitted since are added here.
"""

from collections import Counter, deque
from collections.abc import Callable
from heapq import nlargest
from operator import itemgetter
from typing import Final, Self

from tokenmesh.engine.core.outputs import EngineStats
from tokenmesh.engine.exec.kv_bytes import NO_BYTES, KvBytes
from tokenmesh.engine.kv.make_cache import has_prefix_cache
from tokenmesh.engine.request.spec import TenantShare
from tokenmesh.engine.runner import NO_IMAGES, HostImages
from tokenmesh.services.worker_svc.loaded import Loaded
from tokenmesh.services.worker_svc.streams import WorkerStreams
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.messages.beat import WorkerLoad
from tokenmesh.shared.messages.place import Refused
from tokenmesh.shared.tenant_share import is_within_share

TOO_MANY: Final = "max_num_queued_reqs"
TOO_LONG: Final = "max_num_queued_tokens"
"""The two limits of a queue in vLLM's words, for a metric."""
_MIN_RETRY_S: Final = 0.1
_ASSUMED_RETRY_S: Final = 1.0
"""While no prefill rate is known."""
_MAX_TENANTS: Final = 64
"""In a heartbeat, which is sent often."""


class LoadBook:
    """Accepted work, in streams and prompt tokens."""

    def __init__(
        self,
        settings: WorkerSettings,
        num_blocks: int,
        kv_bytes: KvBytes = NO_BYTES,
        *,
        num_saved_states: int = 0,
        has_prefix_cache: bool = True,
        pools: bool = False,
        images: HostImages = NO_IMAGES,
    ) -> None:
        """num_blocks: with the null block. pools: streams are Pools, which hold no row and no
        blocks for long: what is queued are their tokens."""
        self._settings = settings
        self._num_blocks = num_blocks - 1
        self._kv_bytes = kv_bytes
        self._num_saved = num_saved_states
        self._has_prefix_cache = has_prefix_cache
        self._pools = pools
        self.images = images
        """Room of the host tier."""
        self._stats = EngineStats()
        self._num_submitted = 0
        self._pending: deque[int] = deque()
        """Tokens of submitted requests that the engine's numbers do not hold yet."""
        self._pending_tokens = 0
        self.cached_tokens = 0
        """Prompt tokens of ended streams that the prefix cache held."""
        self.num_preparing = 0
        """Requests that were accepted and are not ready for the engine."""
        self.on_refusal: Callable[[str], None] = lambda limit: None
        """Called with the limit that a request would have exceeded."""

    @classmethod
    def of(cls, settings: WorkerSettings, loaded: Loaded) -> Self:
        """Return the load of a worker with that model."""
        runner = loaded.runner
        return cls(
            settings,
            runner.num_blocks,
            loaded.kv_bytes,
            num_saved_states=runner.num_saved_states,
            has_prefix_cache=has_prefix_cache(settings, runner),
            pools=loaded.pooling is not None,
            images=runner.images,
        )

    @property
    def stats(self) -> EngineStats:
        """Return the numbers of the engine's last step."""
        return self._stats

    @property
    def cache_config(self) -> dict[str, str]:
        """The KV cache's shape, as labels of a metric."""
        return {
            "block_size": str(self._settings.block_size),
            "cache_dtype": self._settings.kv_code or "auto",
            "num_gpu_blocks": str(self._num_blocks),
            "enable_prefix_caching": str(self._has_prefix_cache),
        }

    def kv_bytes(self, *, of_rows: bool, in_use: bool) -> int:
        """Bytes of states, or else of blocks: all, saved states included, or what streams hold."""
        if of_rows:
            all_slots = self._settings.num_rows + self._num_saved
            return (self._stats.running if in_use else all_slots) * self._kv_bytes.row
        num_blocks = self._stats.kv_blocks_used if in_use else self._num_blocks
        return num_blocks * self._kv_bytes.block

    def _kv_blocks(self) -> tuple[int, int]:
        """In use, and all. Where rows keep states alone blocks take no memory, so rows count."""
        if self._kv_bytes.row and not self._kv_bytes.block:
            return self._stats.running, self._settings.num_rows
        return self._stats.kv_blocks_used, self._num_blocks

    def submitted(self, num_tokens: int) -> None:
        """A request went to the engine."""
        self._num_submitted += 1
        self._pending.append(num_tokens)
        self._pending_tokens += num_tokens

    def update(self, stats: EngineStats) -> None:
        """The engine took a step."""
        self._stats = stats
        while len(self._pending) > self._num_submitted - stats.num_added:
            self._pending_tokens -= self._pending.popleft()

    def refusal(
        self, num_tokens: int, owner: TenantShare, streams: WorkerStreams
    ) -> Refused | None:
        """Why a request of that many tokens is refused now; None: it is accepted."""
        load = self.load(streams=streams)
        settings = self._settings
        held = load.running + load.waiting
        if held >= settings.num_rows + settings.max_waiting:
            self.on_refusal(TOO_MANY)
            return Refused(
                reason=f"{held} streams are running or waiting here already",
                retry_after_s=self._wait_s(),
            )
        queued = load.queued_tokens
        own = load.tenant_streams.get(owner.tenant, 0)
        has_others = len(load.tenant_streams) > (own > 0)
        # streams of other tenants must not keep out a tenant below its share
        if has_others and is_within_share(load, owner.tenant, owner.weight, own + 1):
            return None
        if queued and queued + num_tokens > settings.max_waiting_tokens:
            self.on_refusal(TOO_LONG)
            return Refused(
                reason=f"{queued} tokens wait to be computed", retry_after_s=self._wait_s()
            )
        return None

    def load(
        self,
        sleep_level: int = 0,
        *,
        streams: WorkerStreams | None = None,
        is_indexed: bool = False,
        is_compiler_starting: bool = False,
    ) -> WorkerLoad:
        """For the heartbeat. `streams` give the tenants."""
        stats = self._stats
        holders = streams.holders() if streams is not None else Counter()
        weights = {owner.tenant: owner.weight for owner in holders}
        blocks_used, blocks_total = self._kv_blocks()
        running = stats.running
        waiting = stats.waiting + len(self._pending) + self.num_preparing
        starting = streams.num_starting if streams is not None else 0
        if self._pools and streams is not None:
            # what is reserved for a Pool is until its end, as it is for a stream's first token
            running, waiting, starting = streams.num_live, 0, streams.num_live
        return WorkerLoad(
            running=running,
            waiting=waiting,
            max_num_seqs=self._settings.num_rows,
            queued_tokens=stats.queued_tokens + self._pending_tokens,
            kv_blocks_used=blocks_used,
            kv_blocks_total=blocks_total,
            prefill_tokens_per_s=stats.prefill_tokens_per_s,
            step_s=stats.step_s,
            starting=starting,
            is_indexed=is_indexed,
            sleep_level=sleep_level,
            preemptions=stats.num_preemptions,
            prefill_tokens=stats.prefill_tokens,
            decode_tokens=stats.decode_tokens,
            cached_tokens=self.cached_tokens,
            tenant_streams=_largest(holders),
            tenant_weight=sum(weights.values()),
            tenant_levels=dict(nlargest(_MAX_TENANTS, stats.tenant_levels.items(), itemgetter(1))),
            is_compiler_starting=is_compiler_starting,
        )

    def _wait_s(self) -> float:
        rate = self._stats.prefill_tokens_per_s
        if not rate:
            return _ASSUMED_RETRY_S
        return max(_MIN_RETRY_S, (self._stats.queued_tokens + self._pending_tokens) / rate)


def _largest(holders: Counter[TenantShare]) -> dict[str, int]:
    streams: Counter[str] = Counter()
    for owner, number in holders.items():
        streams[owner.tenant] += number
    return dict(streams.most_common(_MAX_TENANTS))


class EarlyHeartbeats:
    """Counts ended streams since the last early beat. Times are monotonic seconds."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._enough = max(1, int(settings.max_num_seqs * settings.early_beat_share))
        self._interval_s = settings.early_beat_interval_s
        self._num_ended = 0
        self._beat_at = 0.0

    def is_due(self, num_ended: int, now: float) -> bool:
        """Return whether to beat now, after `num_ended` more streams have ended."""
        self._num_ended += num_ended
        if self._num_ended < self._enough or now - self._beat_at < self._interval_s:
            return False
        self._num_ended = 0
        self._beat_at = now
        return True

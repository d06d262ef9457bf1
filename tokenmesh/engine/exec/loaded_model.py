"""LoadedModel: a model with weights, and what the rest of the worker needs of it."""

from dataclasses import dataclass

from tokenmesh.engine.adapters.adapter import AdapterSource
from tokenmesh.engine.exec.kv_bytes import KvBytes
from tokenmesh.engine.exec.maker import LoadTimes
from tokenmesh.engine.exec.pool_runner import PoolRunner
from tokenmesh.engine.exec.profile_run import AnyRunner
from tokenmesh.engine.exec.resident import TorchResident
from tokenmesh.engine.exec.runner import TorchTrace
from tokenmesh.engine.kv.shared_arena import SharedKv
from tokenmesh.engine.media_facts import MediaFacts
from tokenmesh.engine.models.api import ModelFacts
from tokenmesh.engine.models.pooling.facts import PoolingFacts
from tokenmesh.engine.ranks.rendezvous import LeaderGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """It holds what a model that generates and one that pools have in common.

    Implements `Loaded`.
    """

    runner: AnyRunner | PoolRunner
    facts: ModelFacts
    max_model_len: int
    resident: TorchResident
    kv_bytes: KvBytes
    adapters: AdapterSource
    """Reads adapters for the model."""
    shared_kv: SharedKv | None = None
    group: LeaderGroup | None = None
    """The ranks that compute it; None: this process alone."""
    eos_token_ids: frozenset[int] = frozenset()
    pooling: PoolingFacts | None = None
    make_trace: type[TorchTrace] = TorchTrace

    @property
    def num_ranks(self) -> int:
        return 1 if self.group is None else self.group.ranks.size

    @property
    def num_stages(self) -> int:
        return 1 if self.group is None else self.group.ranks.pipe.stages

    def wait_seconds(self, rank: int) -> float:
        if self.group is None:
            return 0.0
        return self.group.ranks.pipe.wait_s if rank == 0 else self.group.link.beats[rank].wait_s

    def sum_seconds(self, rank: int) -> float:
        if self.group is None:
            return 0.0
        return self.group.ranks.sum_s if rank == 0 else self.group.link.beats[rank].sum_s

    @property
    def has_grammars(self) -> bool:
        return self.pooling is None

    @property
    def vocab_size(self) -> int:
        return self.facts.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.facts.hidden_size

    @property
    def media(self) -> MediaFacts:
        return self.facts.media

    @property
    def encoder_states(self) -> int:
        return self.facts.encoder_states

    @property
    def weight_format(self) -> str:
        return self.facts.weight_format

    @property
    def rope_boundary(self) -> int | None:
        return self.facts.rope_boundary

    def cache_salt(self, salt: str | None, num_prompt: int) -> str | None:
        return self.facts.cache_salt(salt, num_prompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnableModel(LoadedModel):
    """A model that generates."""

    runner: AnyRunner
    dtype: str
    """"float32", "bfloat16" or "float16"."""
    times: LoadTimes
    pool_s: float
    """Seconds to measure memory and make the KV pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPooler(LoadedModel):
    """A model that pools."""

    runner: PoolRunner
    pooling: PoolingFacts

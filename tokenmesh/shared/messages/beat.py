"""Heartbeat: what an instance serves and how busy it is, published regularly."""

from typing import Final

import msgspec

from tokenmesh.shared.ids import InstanceId, ModelName
from tokenmesh.shared.messages.adapters import AdapterCard
from tokenmesh.shared.messages.pooling import PoolTask

PROTOCOL: Final = 1
"""The major version: raised when processes could no longer work together. A minor one only adds
fields with defaults and messages that may be ignored."""


class ModelCard(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A model as a worker serves it."""

    name: ModelName
    aliases: list[ModelName] = []
    max_model_len: int
    vocab_size: int
    created_s: float = 0.0
    takes_images: bool = False
    hidden_size: int = 0
    """Width of a token's embedding; 0: none can be given."""
    eos_token_ids: list[int] = []
    """Tokens that end an answer."""
    block_size: int = 0
    """Tokens of a block of the prefix cache; 0: the worker has no prefix cache."""
    generates: bool = True
    """False of encoders and classifiers."""
    tasks: list[PoolTask] = []
    """Tasks of pooling that the model has."""
    pooled_size: int = 0
    """Width of an embedding, or the number of labels; 0: the model does not pool."""
    labels: list[str] = []
    """Names of a classifier's labels, in their order."""
    adapters: list[AdapterCard] = []
    """LoRA adapters of the model that can be requested by their names."""
    resolves_adapters: bool = False
    """The worker looks for an unknown adapter in a directory."""
    adapter: AdapterCard | None = None
    """The one that a request names; in no heartbeat."""
    takes_audio: bool = False
    """True where prompts may hold recordings; a model that only transcribes them takes none."""
    takes_adapters: bool = False
    """True where LoRA adapters can be loaded."""
    on_demand: bool = False
    """The worker sleeps when it has no requests, and is woken by the next one."""
    slots: str = ""
    """Workers on demand with the same value share a bound on how many are awake; empty: none."""
    weight_format: str = ""
    """The format of its weights: a method of quantization, or a type."""
    ranks: int = 1
    """Processes that share the model."""
    stages: int = 1
    """Stages of layers that these are divided into."""
    host_kv_bytes: int = 0
    """Host memory that the KV pool takes once all of it has been used; 0: it is on a GPU."""
    only_transcribes: bool = False
    """The model answers nothing but recordings."""
    needs_encoder: bool = False
    """True where prompts may hold images, videos or recordings, which an encoder turns into
    embeddings."""
    embeds_in_chunks: bool = False
    """True where a text that is longer than `max_model_len` is embedded in parts."""
    max_embed_len: int = 0
    """Longest text that is embedded, tokens; 0: any in parts, else `max_model_len`."""
    draft_method: str = ""
    """Where drafts of the next tokens come from; empty: there are none."""
    max_drafts: int = 0
    """Most of one stream in one step."""
    takes_predictions: bool = False
    """Drafts come from the prediction of a request that has one."""

    kv_role: str = ""
    """The part of the worker among others: both, prefill or decode; empty: it exchanges no KV."""
    kv_scope: bytes = b""
    """KV is exchanged between equal ones."""
    kv_tiers: list[str] = []
    """Where KV is besides the pool: host, disk, mooncake."""

    @property
    def requested_name(self) -> str:
        """The name in responses and accounts: the adapter's if there is one."""
        return self.name if self.adapter is None else self.adapter.name


class WorkerLoad(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The state of a worker by which requests are placed."""

    running: int = 0
    waiting: int = 0
    max_num_seqs: int = 1
    queued_tokens: int = 0
    """Prompt tokens accepted and not yet computed."""
    kv_blocks_used: int = 0
    kv_blocks_total: int = 1
    prefill_tokens_per_s: float = 0.0
    """EWMA that the worker measures; 0 before the first measurement."""
    step_s: float = 0.0
    """EWMA of a decode step's duration."""
    starting: int = 0
    """Streams among the running and waiting ones that have no first token yet."""
    is_indexed: bool = False
    """The prefix index is current for the worker, reservations included."""
    sleep_level: int = 0
    """Above 0 the worker takes no streams until it is woken."""
    preemptions: int = 0
    """Since the process started, as the two below."""
    prefill_tokens: int = 0
    """Prompt tokens computed; those found in the prefix cache are not among them."""
    decode_tokens: int = 0
    """Tokens computed by streams that decode, refused drafts included."""
    cached_tokens: int = 0
    """Prompt tokens of ended streams that were found in the prefix cache."""
    tenant_streams: dict[str, int] = {}
    """Running and waiting streams of each tenant; of the largest ones, where they are many."""
    tenant_weight: float = 0.0
    """Sum of the weights of all tenants that have any; 0: not reported."""
    tenant_levels: dict[str, float] = {}
    """Use of the worker by its heaviest tenants lately, divided by their weights."""
    is_compiler_starting: bool = False
    """A stream with a grammar would wait for the worker's grammar libraries to load."""
    idle_s: float = 0.0
    """Seconds without streams; only of a worker on demand."""
    sleeps_in_s: float | None = None
    """Seconds until a worker on demand sleeps if no request comes; None: it does not by itself."""
    kv_tokens_per_s: float = 0.0
    """It reads KV of other workers this fast; 0: it cannot."""
    kv_leases: int = 0
    """Prompts whose KV it keeps for others now."""


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="Beat", omit_defaults=True):
    """Published on `tm.beat.<service>.<id>`; every 250 ms by workers, every second by others."""

    service: str
    instance_id: InstanceId
    epoch: int
    sequence: int
    version: str
    protocol: int = 1
    """The default never changes: a missing field must mean the same to every version."""
    draining: bool = False
    leaving: bool = False
    """The last heartbeat of this epoch: forget the instance now."""
    interval_s: float = 1.0
    models: list[ModelCard] = []
    load: WorkerLoad | None = None
    queued: int = 0
    """Requests that wait in a scheduler for a worker."""
    tokenizes: list[ModelCard] = []
    """Models that a tokenizer knows, as it knows them: apart from `models`, which workers serve."""
    starts: list[ModelName] = []
    """Models that the instance is loading; until it has, it answers nothing. Empty afterwards.

    It also says `draining` meanwhile, for older processes: they would take it for one that answers.
    """
    broken: dict[ModelName, str] = {}
    """Models that the instance could not load, by each of their names, and why."""
    alone: str = ""
    """The sole turn in which the instance works on one request and nothing else; empty: in none."""

"""WorkerSettings: the engine, its memory, its queue, and the simulated engine's timing."""

from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from tokenmesh.shared.config.eplb import EplbConfig
from tokenmesh.shared.config.fixed import fixed
from tokenmesh.shared.config.kv import KvSettings
from tokenmesh.shared.config.lora import LoraSettings
from tokenmesh.shared.config.on_demand import OnDemandSettings

EngineKind = Literal["torch", "sim"]
DeviceKind = Literal["auto", "cpu", "cuda"]
GrammarBackend = Literal["auto", "xgrammar", "guidance"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
EXCHANGED_GIB: Final = 1.0
"""Host memory of a worker that exchanges KV or keeps it on disk, where no other size is set."""
KvCacheDtype = Literal["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8"]


class WorkerSettings(BaseModel):
    """Limits of worker_svc. Names that vLLM has mean what they mean there. Times are seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: EngineKind = Field(
        default="torch",
        description="torch: a real model. sim: no model, a timing model and deterministic tokens.",
    )
    model: str | None = Field(
        default=None,
        description="Served name of the model that this worker runs, when `models` lists several.",
    )
    device: DeviceKind = Field(
        default="auto", description="Where a model runs; auto: on a GPU when there is one."
    )
    enforce_eager: bool = Field(
        default=False, description="GPU: record no CUDA graphs; starts sooner, decodes slower."
    )
    max_cudagraph_capture_size: int = Field(
        default=512,
        ge=1,
        description="GPU: streams of the largest decode step that is recorded as a CUDA graph.",
    )
    cpu_threads: int | None = Field(
        default=None,
        ge=1,
        description="Threads of a rank of a model on a CPU; default: a core each, divided by the "
        "ranks of a host.",
    )
    tensor_parallel_size: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Ranks that share a model: each computes with a part of the weights, and holds "
        "a part of the KV cache. More than 1: on CPUs.",
    )
    enable_expert_parallel: bool = Field(
        default=False,
        description="Each rank of a mixture of experts has some experts whole, instead of a part "
        "of each.",
    )
    enable_eplb: bool = Field(
        default=False,
        description="With enable_expert_parallel: experts are moved between ranks while the model "
        "runs, so that all have about equally many tokens to compute.",
    )
    eplb_config: EplbConfig = Field(
        default_factory=EplbConfig, description="How experts are moved, with enable_eplb."
    )
    pipeline_parallel_size: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Stages that share a model: each has some of the layers, with their KV cache. "
        "More than 1: for models of the native kind on CPUs; each stage has "
        "`tensor_parallel_size` ranks.",
    )
    rank_start_s: float = fixed(
        default=600.0, gt=0, description="How long all ranks of a worker have to appear."
    )
    rank_silence_s: float = Field(
        default=1.5,
        ge=0.75,
        description="A rank that is silent for longer counts as dead, and its worker ends.",
    )
    native_kernels: bool = Field(
        default=True,
        description="C kernels on CPUs with AVX-512 or AVX2, compiled at first use; else torch's.",
    )
    float32_matmul_precision: Literal["highest", "high"] = Field(
        default="high",
        description="high: the C kernels compute float32 products of encoders with integers of 16 "
        "bits, twice as fast, where states move by less than a thousandth; highest: in float32.",
    )
    native_cache_dir: str = Field(
        default="~/.cache/tokenmesh/kernels",
        description="Where they are kept once compiled; no other user may write there.",
    )
    batch_invariant: bool = Field(
        default=False,
        description="Refuse to start where a stream's numbers could depend on those computed with "
        "it; the C kernels never let them, so it costs nothing.",
    )
    max_num_seqs: int = Field(
        default=256,
        ge=1,
        le=4096,
        description="Streams in one batch, at most as many as a step has tokens.",
    )
    max_num_batched_tokens: int = Field(
        default=1024, ge=1, description="Tokens computed in one step: the budget of a step."
    )
    long_prefill_token_threshold: int = Field(
        default=512,
        ge=0,
        description="Longest prefill chunk while other streams run; 0: only the budget bounds it.",
    )
    async_scheduling: bool | None = Field(
        default=None,
        description="Launch a step before the tokens of the one before it are read; default: where "
        "the model has a device of its own. A CPU that computes has no time left to overlap.",
    )
    launch_ahead_s: float = fixed(
        default=0.002,
        ge=0,
        description="How long before the expected end of a step the next one is launched; streams "
        "that arrive until then are in it.",
    )
    block_size: int = Field(
        default=16,
        ge=1,
        le=1024,
        description="Tokens of one KV block, any number; on a GPU a power of two. The router knows "
        "what is cached only where `tokenizer.route_block_tokens` is a multiple.",
    )
    kv_cache_dtype: KvCacheDtype = Field(
        default="auto",
        description="Type of the KV cache; auto: the model's. fp8 (fp8_e4m3) and "
        "fp8_e5m2 take the checkpoint's scales, or 1; int8 has one for each head of a token and is "
        "for CPUs.",
    )
    logprobs_mode: LogprobsMode = Field(
        default="raw_logprobs",
        description="Log-probabilities of generated tokens: of the model's own distribution, or on "
        "a CPU of the one that is drawn from, after penalties, temperature and filters.",
    )
    enable_prefix_caching: bool = Field(
        default=True, description="Reuse the KV blocks of equal prompt beginnings."
    )
    lora: LoraSettings = Field(default_factory=LoraSettings, description="LoRA adapters.")
    on_demand: OnDemandSettings = OnDemandSettings()
    mamba_block_size: int = Field(
        default=512,
        ge=1,
        description="Models with states: fewest tokens at whose end a prompt's state is saved, and "
        "between two such ends; a chunk of the prompt ends there. Rounded up to whole blocks.",
    )
    saved_states: int | None = Field(
        default=None,
        ge=0,
        description="Models with states: how many are saved for equal prompt beginnings; 0: none, "
        "and no prefix cache. Default: two for each row, within a quarter of the KV memory.",
    )
    num_gpu_blocks_override: int | None = Field(
        default=None, ge=2, description="KV blocks, the null block included, instead of a measure."
    )
    kv_cache_memory_bytes: int | None = Field(
        default=None, ge=1, description="KV memory in bytes, instead of a share of what is free."
    )
    gpu_memory_utilization: float = Field(
        default=0.9, gt=0, le=1, description="Share of GPU memory for weights and KV."
    )
    cpu_memory_utilization: float = Field(
        default=0.3,
        gt=0,
        le=1,
        description="Share of free host memory for KV on a CPU; at 0.3, which is the default, at "
        "most 2 GiB or four requests of full length.",
    )
    kv_offloading_size: float | None = Field(
        default=None,
        ge=0,
        description="GiB of host memory that keep KV blocks which the pool has lost, besides its "
        "own; equal prompt beginnings and preempted streams are copied from there instead of "
        "computed. For CPUs, and models that keep no states. Default, and 0: none; 1 with kv.role "
        "kv.disk_dir or kv.mooncake_master.",
    )
    kv: KvSettings = Field(
        default_factory=KvSettings, description="KV of other workers, and on disk."
    )
    load_buffer_bytes: int = fixed(
        default=4 * 1024 * 1024,
        ge=4096,
        description="Buffer for weights that change their type or go to a GPU while they are read.",
    )
    profiler_dir: str | None = Field(
        default=None, description="Where POST /stop_profile writes traces; none: no profiling."
    )
    profiler_max_steps: int = fixed(
        default=500, ge=1, description="Engine steps after which a profile ends by itself."
    )
    profiler_max_s: float = fixed(
        default=60.0, gt=0, description="Time after which a profile ends by itself."
    )
    kv_watermark: float = fixed(
        default=0.01,
        ge=0,
        lt=1,
        description="Share of KV blocks kept free for running streams when one is admitted.",
    )
    max_waiting: int = Field(
        default=512, ge=1, description="Streams that may wait for a row; beyond: Refused."
    )
    max_waiting_tokens: int = Field(
        default=1_048_576, ge=1, description="Prompt tokens that may wait; beyond: Refused."
    )
    early_beat_share: float = fixed(
        default=0.125,
        gt=0,
        description="Share of max_num_seqs whose streams must end before a heartbeat is early.",
    )
    early_beat_interval_s: float = fixed(
        default=0.02, gt=0, description="Shortest time between two early heartbeats."
    )
    max_step_failures: int = fixed(
        default=3, ge=1, description="Steps that may fail in a row before the worker gives up."
    )
    max_step_s: float = fixed(
        default=120.0, gt=0, description="A step that takes longer is stuck: the worker gives up."
    )
    engine_check_s: float = fixed(default=1.0, gt=0, description="How often that is looked at.")
    max_unpublished_steps: int = fixed(
        default=256, ge=1, description="Finished steps that may wait for the bus side."
    )
    publish_wait_s: float = fixed(
        default=30.0, gt=0, description="How long the engine waits for the bus side, then gives up."
    )
    resend_streams: int = fixed(
        default=1024, ge=1, description="Ended streams whose output is kept for Resend."
    )
    resend_window_s: float = fixed(
        default=60.0, gt=0, description="How long the output of an ended stream is kept."
    )
    media_wait_s: float = fixed(
        default=10.0, gt=0, description="Deadline for fetching a request's media embeddings."
    )
    structured_outputs_backend: GrammarBackend = Field(
        default="auto",
        description="Library for structured output; auto and xgrammar: xgrammar, and llguidance "
        "for what that cannot do to the letter, which xgrammar logs; guidance: llguidance alone.",
    )
    grammar_processes: int = Field(
        default=2,
        ge=1,
        description="Processes that compile grammars. One tenant's take all but one of them.",
    )
    grammar_prestart: bool = fixed(
        default=True,
        description="Start them, and load the grammar libraries, as soon as the worker is ready; "
        "until then schedulers place streams with grammars on other workers with room. Off: with "
        "the first grammar, which then waits for seconds.",
    )
    grammar_queue: int = fixed(
        default=256,
        ge=1,
        description="Grammars that may wait for one; beyond, the tenant with the most is refused.",
    )
    grammar_compile_s: float = Field(
        default=10.0, gt=0, description="Compiling one grammar with one library; then refused."
    )
    grammar_memory_bytes: int = fixed(
        default=1 << 30, ge=1 << 20, description="Memory that compiling one grammar may take."
    )
    grammar_max_bytes: int = fixed(
        default=8 << 20, ge=1024, description="Largest compiled grammar."
    )
    grammar_cache_bytes: int = fixed(
        default=256 << 20, ge=0, description="Compiled grammars kept for later requests."
    )
    grammar_failures: int = fixed(
        default=1024, ge=1, description="Grammars that did not compile whose reason is remembered."
    )
    grammar_retry_s: float = fixed(
        default=60.0,
        gt=0,
        description="A grammar whose compilation took too long or died is not tried again for so "
        "long; one that is wrong never is while it is remembered.",
    )
    grammar_shared_slots: int = fixed(
        default=256,
        ge=0,
        description="Compiled grammars of a model kept in Redis, so that a stream that moves finds "
        "its grammar compiled; 0: none.",
    )
    grammar_shared_wait_s: float = fixed(
        default=0.25,
        gt=0,
        description="Deadline of the lookup in Redis before it is compiled here.",
    )
    grammar_step_s: float = fixed(
        default=0.25,
        gt=0,
        description="CPU time of one step of one grammar; a stream whose grammar takes longer ends "
        "with an error.",
    )
    gateway_check_s: float = fixed(
        default=0.5, gt=0, description="How often streams of vanished gateways are looked for."
    )
    gateway_grace_s: float = fixed(
        default=2.0, gt=0, description="How long a gateway may be unknown before its streams end."
    )
    hand_over_s: float = fixed(
        default=1.0,
        gt=0,
        description="Rest of the drain time in which streams still running move to other workers.",
    )
    trace_step_events: int = fixed(
        default=128, ge=2, description="Decode steps kept as events of one span; then thinned out."
    )
    trace_steps: int = fixed(
        default=16384, ge=16, description="Engine steps remembered for such events."
    )
    sim_num_blocks: int = Field(
        default=16384, ge=2, description="sim: KV blocks, the null block included."
    )
    sim_prefill_tokens_per_s: float = Field(
        default=20_000.0, gt=0, description="sim: prefill speed."
    )
    sim_step_s: float = Field(default=0.004, ge=0, description="sim: fixed time of a step.")
    sim_seq_s: float = Field(
        default=0.00002, ge=0, description="sim: time each stream adds to a step."
    )
    sim_time_scale: float = Field(
        default=1.0, ge=0, description="sim: factor on all times; 0 does not wait at all."
    )

    @property
    def kv_code(self) -> str:
        """Name of the 8-bit type of the KV cache; empty: it has the model's type."""
        if self.kv_cache_dtype in ("auto", "bfloat16"):
            return ""
        return "fp8_e4m3" if self.kv_cache_dtype == "fp8" else self.kv_cache_dtype

    @property
    def host_tier_bytes(self) -> int:
        """Memory of the host tier; 0: there is none."""
        size = self.kv_offloading_size
        if size is None:
            size = EXCHANGED_GIB if self.kv.is_used else 0
        return int(size * (1 << 30))

    @property
    def num_ranks(self) -> int:
        """Processes that share the model, in all stages."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def num_rows(self) -> int:
        """Streams that run at a time: each that decodes takes a token of every step."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

"""vLLM's flags without a setting here: those without an effect, and unsupported ones.

An error names the flag and what to do; it never guesses another flag by its spelling.
"""

from typing import Final, NamedTuple


class Fixed(NamedTuple):
    """A flag for what TokenMesh always does, or supports with some values only."""

    meaning: str
    values: tuple[str, ...] | None = None
    """Values that may follow the flag; None: it is a switch; empty: anything."""
    warns: bool = False
    """True where taking the flag needs a warning: what it asks for does not happen."""


_REPLICAS: Final = "replicas are workers of their own: `up --workers N`, or more of `serve worker`"
_HOSTS: Final = (
    "torchrun starts ranks on several hosts, as docs/guides/more-than-one-device.md shows"
)
_WHOLE_SEQUENCES: Final = (
    "a rank has the keys of whole sequences for its heads: --tensor-parallel-size divides KV, a "
    "head that several ranks need is on each"
)
_PROFILE: Final = "a profile has what torch records by default"

FIXED: Final = {
    "attention-backend": Fixed("there is one, chosen by the device", (), warns=True),
    "attention-config": Fixed("attention is chosen by the device", (), warns=True),
    "chat-template-content-format": Fixed("read from the template", ("auto",)),
    "config-format": Fixed("checkpoints are in Hugging Face's format", ("auto", "hf")),
    "cpu-offload-gb": Fixed("weights are on one device", ("0",)),
    "data-parallel-size": Fixed(_REPLICAS, ("1",)),
    "decode-context-parallel-size": Fixed(_WHOLE_SEQUENCES, ("1",)),
    "disable-cascade-attn": Fixed("cascade attention is not implemented"),
    "disable-custom-all-reduce": Fixed("sums are those of torch.distributed"),
    "disable-log-requests": Fixed("requests are traced, not logged"),
    "disable-log-stats": Fixed("statistics are at GET /metrics, not in the log"),
    "disable-uvicorn-access-log": Fixed("requests are traced, not logged"),
    "distributed-executor-backend": Fixed(
        "ranks are processes, which torchrun starts on other hosts: "
        "docs/guides/more-than-one-device.md",
        ("mp", "uni", "external_launcher"),
    ),
    "enable-auto-tool-choice": Fixed("tool calls are always parsed"),
    "enable-chunked-prefill": Fixed("prefill is always chunked"),
    "enable-prompt-tokens-details": Fixed("usage always has prompt_tokens_details"),
    "enable-request-id-headers": Fixed("X-Request-Id is always sent back"),
    "enable-server-load-tracking": Fixed("GET /load always counts"),
    "enable-sleep-mode": Fixed(
        "workers can sleep anyway; --enable-admin-routes serves /sleep and /wake_up", warns=True
    ),
    "enable-ssl-refresh": Fixed("certificates are read again when they change"),
    "fully-sharded-loras": Fixed("ranks divide adapters as the layers that they change"),
    "kv-events-config.publisher": Fixed(
        "events are published on NATS: docs/guides/subscribe-to-block-events.md", ("null",)
    ),
    "load-format": Fixed(
        "a checkpoint is read as what it is", ("auto", "hf", "safetensors", "gguf")
    ),
    "lora-dtype": Fixed("adapters are computed in the model's type", ("auto",)),
    "mamba-cache-mode": Fixed(
        "states are saved at ends of blocks; `worker.saved_states` 0 saves none", ("align",)
    ),
    "nnodes": Fixed(_HOSTS, ("1",)),
    "prefill-context-parallel-size": Fixed(_WHOLE_SEQUENCES, ("1",)),
    "profiler-config.profiler": Fixed("torch's profiler is the one there is", ("torch",)),
    "profiler-config.torch-profiler-dump-cuda-time-total": Fixed(_PROFILE, ()),
    "profiler-config.torch-profiler-record-shapes": Fixed(_PROFILE, ()),
    "profiler-config.torch-profiler-use-gzip": Fixed(_PROFILE, ()),
    "profiler-config.torch-profiler-with-flops": Fixed(_PROFILE, ()),
    "profiler-config.torch-profiler-with-memory": Fixed(_PROFILE, ()),
    "profiler-config.torch-profiler-with-stack": Fixed(_PROFILE, ()),
    "reasoning-config.reasoning-start-str": Fixed("the parser knows how reasoning begins", ()),
    "response-role": Fixed("answers are the assistant's", ("assistant",)),
    "scheduling-policy": Fixed(
        "requests go by their `priority`, then by their arrival", ("fcfs", "priority")
    ),
    "show-hidden-metrics-for-version": Fixed("no metric is hidden", ()),
    "stream-interval": Fixed("a request may set `stream_interval`", ("1",)),
    "task": Fixed("`--runner` and `--convert` choose what a model does", ("auto", "generate")),
    "trust-request-mm-kwargs": Fixed("a request may have mm_processor_kwargs, within limits"),
    "tokenizer-mode": Fixed("tokenizers are Hugging Face's", ("auto", "hf")),
}
"""Taken without any effect; a value that is not named here is refused."""

ADVICE: Final = {
    "additional-config": "it is for plugins of platforms; leave it out",
    "allowed-local-media-path": "files of the server are never read for a request: send a data URL",
    "api-server-count": "`up --gateways N` runs N of them on one port",
    "calculate-kv-scales": "--kv-cache-dtype fp8 takes the checkpoint's scales, int8 makes its own",
    "cohere-format": "the checkpoint's own chat template is used; leave it out",
    "compilation-config": "kernels are compiled ahead; --enforce-eager turns CUDA graphs off",
    "cudagraph-capture-sizes": "--max-cudagraph-capture-size is the largest of them",
    "custom-histogram-buckets": "the buckets are fixed; leave it out",
    "data-parallel-rank": "start one worker a device: `tokenmesh serve worker`",
    "data-parallel-size-local": "--workers N starts N replicas on this machine",
    "default-chat-template-kwargs": "send chat_template_kwargs with each request",
    "default-mm-loras": "name the adapter as the request's `model`",
    "device-ids": "set CUDA_VISIBLE_DEVICES; --workers N gives each worker a device",
    "device-memory-utilization": "use --gpu-memory-utilization",
    "disable-fastapi-docs": "set gateway.docs to false in --config",
    "download-dir": "set the environment variable HF_HOME",
    "enable-lora-bias": "adapters with biases are not served; merge them into the checkpoint",
    "enable-log-outputs": "outputs are not logged; leave it out",
    "enable-log-requests": "requests are traced, not logged: `tokenmesh trace`",
    "enable-mm-embeds": "send media, not their embeddings",
    "enable-offline-docs": "the pages below /docs need no other server; leave it out",
    "enable-per-request-metrics": "GET /traces has the times of each request; leave it out",
    "enable-return-routed-experts": "which experts ran is not recorded; leave it out",
    "enable-tower-connector-lora": "adapters of towers are not served; merge them",
    "exclude-tools-when-tool-choice-none": "leave the tools out of the request",
    "grpc": "the API is HTTP; leave it out",
    "grpc-port": "the API is HTTP; use --port",
    "guided-decoding-backend": "use --structured-outputs-config.backend",
    "headless": "join workers to a mesh with `tokenmesh serve worker --nats URL --redis URL`",
    "hf-config-path": "put config.json into the checkpoint's directory, or use --hf-overrides",
    "hf-token": "set the environment variable HF_TOKEN",
    "kv-cache-dtype-skip-layers": "all layers' pages have one type; leave it out",
    "kv-events-config": "of its keys there are enable_kv_cache_events and buffer_steps",
    "log-config-file": "set telemetry.log_level and telemetry.log_format in --config",
    "log-level": "use --uvicorn-log-level",
    "logging-config": "set telemetry.log_level and telemetry.log_format in --config",
    "logits-processors": "use logit_bias, bad_words, allowed_token_ids or structured_outputs",
    "lora-extra-vocab-size": "adapters with a vocabulary of their own are not served; merge them",
    "lora-target-modules": "every linear layer that an adapter has is served, or it is refused",
    "master-addr": _HOSTS,
    "master-port": _HOSTS,
    "max-log-len": "requests are traced, not logged; leave it out",
    "max-num-active-seqs": "use --max-num-seqs",
    "max-num-queued-reqs": "set worker.max_waiting, or limits of tenants in --keys-file",
    "max-num-queued-tokens": "set worker.max_waiting_tokens in --config",
    "media-io-kwargs": "settings of tokenizer.media choose the frames of a video",
    "middleware": "put a proxy in front",
    "mm-encoder-only": "encoders are services of their own: `tokenmesh serve encoder`",
    "mm-processor-cache-gb": "set encoder.cache_bytes in --config",
    "mm-processor-kwargs": "send mm_processor_kwargs with each request",
    "node-rank": _HOSTS,
    "optimization-level": "kernels are compiled ahead; --enforce-eager turns CUDA graphs off",
    "pooler-config": "of its keys there are pooling_type, task, use_activation, "
    "enable_chunked_processing and max_embed_len",
    "profiler-config": "of its keys there are profiler and torch_profiler_dir",
    "quantization-config": "edit quantization_config of config.json, or use --hf-overrides",
    "reasoning-config": "of its keys there are reasoning_start_str and reasoning_end_str",
    "reasoning-effort-map": "send an effort that the model's template knows",
    "renderer-num-workers": "--tokenizers N starts N tokenizers",
    "return-sampling-mask": "which tokens the filters kept is not returned; leave it out",
    "rope-scaling": "use --hf-overrides",
    "rope-theta": "use --hf-overrides",
    "skip-tokenizer-init": "a frontend has the tokenizer; --tokens-only serves an engine by ids",
    "speculative-model": "--spec-model names the model that drafts",
    "structured-outputs-config": "of its keys there is `backend`",
    "swap-space": "preempted streams are computed again, or copied with --kv-offloading-size",
    "tokenizer-revision": "--revision is the tokenizer's, too",
    "tool-server": "a request names MCP servers itself; responses.mcp_servers allows them",
    "tool-strict-level": "set `strict` of the tool",
    "use-fp64-gumbel": "noise is drawn in float32; leave it out",
    "watermark": "set worker.kv_watermark in --config",
    "watermark-config": "texts are not watermarked; leave it out",
    "weight-transfer-config": "weights are read from a checkpoint; restart with the new one",
    "worker-extension-cls": "code of others does not run in workers; leave it out",
}
"""Advice for the flags that people have in their scripts."""

_NOTHING_TO_DIVIDE: Final = "a model is divided by layers or within them; leave it out"
_NO_LOCK_STEP: Final = (
    "replicas do not compute in lock step, since each has all experts; leave it out, --workers N "
    "starts N of them, --tensor-parallel-size with --enable-expert-parallel divides experts"
)
_NO_HALVES: Final = (
    "halves of a step do not take turns while their sums travel; leave it out, "
    "--pipeline-parallel-size has several steps in flight"
)
_CHOSEN: Final = "kernels are chosen by the device and the types; leave it out"
_READ_AS_IT_IS: Final = "a checkpoint is read as what it is; leave it out"
_OWN_CACHES: Final = "the caches are managed otherwise; leave it out"
_OWN_SCHEDULE: Final = "steps are scheduled otherwise; leave it out"
_SERVER: Final = "the HTTP server is another one; leave it out, or put a proxy in front"
_MEASURES: Final = "statistics are at GET /metrics and in traces; leave it out"

_REASONS: Final = {
    _NOTHING_TO_DIVIDE: """
        cpu-distributed-timeout-seconds distributed-timeout-seconds ec-manager-config
        ec-transfer-config enable-batch-sharded-sampling enable-hc-sp enable-nccl-comm-suspend
        max-parallel-loading-workers mm-encoder-tp-mode
        ray-workers-use-nsight worker-cls
    """,
    _NO_LOCK_STEP: """
        all2all-backend data-parallel-address data-parallel-backend
        data-parallel-external-lb data-parallel-hybrid-lb
        data-parallel-multi-port-external-lb data-parallel-rpc-port data-parallel-start-rank
        data-parallel-supervisor-port
        disable-nccl-for-dp-sync disable-nccl-for-dp-synchronization
        dp-supervisor-probe-failure-threshold dp-supervisor-probe-interval-s
        dp-supervisor-probe-timeout-s dp-sync-interval elastic-ep-max-dp-size
        enable-elastic-ep enable-ep-weight-filter enable-fault-tolerance
        expert-placement-strategy fault-tolerance-config
    """,
    _NO_HALVES: """
        dbo-decode-token-threshold dbo-prefill-token-threshold enable-dbo ubatch-size
    """,
    _WHOLE_SEQUENCES: """
        cp-kv-cache-interleave-size dcp-comm-backend dcp-kv-cache-interleave-size dcp-q-replicate
    """,
    _CHOSEN: """
        diffusion-config enable-cumem-allocator enable-flash-late-interaction
        enable-flashinfer-autotune enable-mamba-cache-stochastic-rounding
        enable-mixed-moe-lora-format enable-moe-shared-loras engram-config gdn-prefill-backend
        ir-op-priority jit-monitor-mode jit-monitor-verbose kda-decode-backend
        kda-prefill-backend kernel-config linear-backend mamba-backend mamba-cache-dtype
        mamba-cache-philox-rounds mamba-ssm-cache-dtype mamba-ssu-algorithm mm-device-do-normalize
        mm-encoder-attn-backend mm-encoder-attn-dtype mm-encoder-fp8-scale-path
        mm-encoder-fp8-scale-save-margin mm-encoder-fp8-scale-save-path mm-hasher-algorithm
        mm-processor-device moe-backend monokernel numa-bind numa-bind-cpus numa-bind-nodes
        override-attention-dtype performance-mode replayssm-buffer-len sparse-indexer-topk-backend
        specialize-active-lora use-replayssm
    """,
    _READ_AS_IT_IS: """
        allow-deprecated-quantization code-revision disable-sliding-window ignore-patterns
        max-lora-cls-labels model-class-overrides model-loader-extra-config pt-load-map-location
        safetensors-load-strategy safetensors-prefetch-block-size
        safetensors-prefetch-num-threads use-tqdm-on-load
    """,
    _OWN_CACHES: """
        cpu-offload-params disable-hybrid-kv-cache-manager enable-mamba-shared-prefix-checkpoint
        enable-shm-tensor-arena kv-offloading-backend kv-sharing-fast-prefill mm-ipc-gpu-memory-gb
        mm-processor-cache-type mm-shm-cache-max-object-size-mb mm-tensor-ipc offload-backend
        offload-group-size offload-num-in-group offload-params offload-prefetch-step
        prefix-cache-retention-interval prefix-caching-hash-algo prefix-match-unit
        sleep-mode-backend sleep-mode-offload-cudagraph sleep-preserve-parameter-names
        swa-bounded-replay
    """,
    _OWN_SCHEDULE: """
        disable-chunked-mm-input interleave-mm-strings logits-processor-pattern
        long-prefill-token-threshold-adaptive max-long-partial-prefills max-num-partial-prefills
        max-num-scheduled-tokens prefill-schedule-interval scheduler-cls
        scheduler-reserve-full-isl skip-mm-profiling video-pruning-method video-pruning-rate
    """,
    _SERVER: """
        allow-credentials allowed-headers allowed-methods anthropic-disabled-thinking-effort
        disable-access-log-for-endpoints disable-frontend-multiprocessing
        fail-on-environ-validation fingerprint-mode fingerprint-value h11-max-header-count
        h11-max-incomplete-event-size io-processor-plugin ssl-cert-reqs ssl-ciphers
        watchdog-config
    """,
    _MEASURES: """
        aggregate-engine-logging aux-output-config collect-detailed-traces cudagraph-metrics
        enable-layerwise-nvtx-tracing enable-log-deltas enable-logging-iteration-details
        enable-mfu-metrics enable-trace-replay kv-cache-metrics kv-cache-metrics-sample
        log-error-stack per-request-spec-decode-metrics
    """,
}
"""Advice for the rest, which change how vLLM works inside."""

REFUSED: Final = ADVICE | {
    name: reason for reason, names in _REASONS.items() for name in names.split()
}
"""Advice for each flag that is not taken."""

SHORT: Final = {
    "-tp": "tensor-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-dp": "data-parallel-size",
    "-asc": "api-server-count",
    "-dcp": "decode-context-parallel-size",
    "-pcp": "prefill-context-parallel-size",
    "-q": "quantization",
    "-cc": "compilation-config",
    "-sc": "speculative-config",
    "-O": "optimization-level",
    "-n": "nnodes",
    "-r": "node-rank",
}

NAMES: Final = frozenset(REFUSED) | frozenset(FIXED)
"""Flags of vLLM's that no setting stands behind; of their keys those that are fixed."""

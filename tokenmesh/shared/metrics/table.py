"""Every metric of the mesh. A name that is not here cannot be measured.

Names, labels and buckets are vLLM's where vLLM has the metric (with `tokenmesh:` for `vllm:`), so
that its dashboards work; `engine` is the worker's id. Times are seconds.
"""

from dataclasses import dataclass
from typing import Final, Literal

PREFIX: Final = "tokenmesh"
"""Before a colon and the name, unless `telemetry.metrics_prefix` is set."""

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One row. Prometheus adds `_total` to the name of a counter."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


_MODEL: Final = ("model_name", "engine")
_ROUTE: Final = ("handler", "method")

_TTFT_S: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_TOKEN_S: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_REQUEST_S: Final = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
_HOP_S: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10,
)  # fmt: skip
_STEP_TOKENS: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_REQUEST_TOKENS: Final = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000,
)  # fmt: skip
_CHOICES: Final = (1, 2, 5, 10, 20)
_PREEMPTIONS: Final = (0, 1, 2, 3, 5, 10, 20)
_BODY_BYTES: Final = (256, 1024, 4096, 16_384, 65_536, 262_144, 1_048_576, 8_388_608)


def _counter(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, "counter", text, labels)


def _gauge(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, "gauge", text, labels)


def _histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Metric:
    return Metric(name, "histogram", text, labels, buckets)


ENGINE_METRICS: Final = (
    _gauge("num_requests_running", "Streams in the engine's batch.", *_MODEL),
    _gauge("num_requests_waiting", "Streams that wait for a row of the batch.", *_MODEL),
    _gauge(
        "num_requests_waiting_by_reason",
        "Of these: capacity (for a row or blocks), deferred (not yet in the engine).",
        *_MODEL,
        "reason",
    ),
    _gauge(
        "engine_sleep_state",
        "1 for the state it is in: awake, weights_offloaded, discard_all.",
        *_MODEL,
        "sleep_state",
    ),
    _gauge(
        "cache_config_info",
        "1; the KV cache's shape is in the labels.",
        *_MODEL,
        "block_size",
        "cache_dtype",
        "num_gpu_blocks",
        "enable_prefix_caching",
    ),
    _gauge("model_weights", "1; the format of the weights is a label.", *_MODEL, "format"),
    _gauge("ranks", "Processes that share the model.", *_MODEL),
    _gauge("stages", "Stages of layers that these are divided into.", *_MODEL),
    _gauge(
        "rank_wait_seconds",
        "Seconds that a rank has waited for hidden states of another stage: the slow stage has "
        "least.",
        *_MODEL,
        "rank",
    ),
    _gauge(
        "rank_sum_seconds",
        "Seconds that a rank has spent in sums, waits for the others included: the slow one has "
        "least.",
        *_MODEL,
        "rank",
    ),
    _gauge("lora_adapters", "Adapters that requests may name.", *_MODEL),
    _gauge("lora_adapters_in_memory", "Those whose matrices are in memory.", *_MODEL),
    _gauge("lora_adapters_active", "Those that streams use.", *_MODEL),
    _gauge("lora_max_adapters", "Most that streams may use at a time: max_loras.", *_MODEL),
    _counter("lora_streams", "Streams with an adapter that have ended.", *_MODEL, "adapter"),
    _gauge("lora_streams_waiting", "Streams that wait until others of these end.", *_MODEL),
    _gauge("prefix_index_current", "1 while Redis knows the worker's prefix cache.", *_MODEL),
    _gauge("prefix_index_blocks", "Route blocks in the worker's prefix cache.", *_MODEL),
    _counter("prefix_index_rewrites", "Times that all of them were written anew.", *_MODEL),
    _counter(
        "block_events",
        "Events of the prefix cache: BlockStored, BlockRemoved, AllBlocksCleared.",
        *_MODEL,
        "kind",
    ),
    _counter(
        "block_event_batches",
        "Batches of them: published, or dropped because the bus took none.",
        *_MODEL,
        "outcome",
    ),
    _counter(
        "block_event_replays",
        "Requests for earlier batches: replayed, not held.",
        *_MODEL,
        "outcome",
    ),
    _gauge("block_event_ring_batches", "Batches held for replay.", *_MODEL),
    _gauge("block_event_ring_bytes", "The same in bytes.", *_MODEL),
    _gauge("block_event_snapshots", "Snapshots that are being read.", *_MODEL),
    _gauge("block_event_blocks", "Blocks that subscribers should know of.", *_MODEL),
    _gauge(
        "kv_cache_usage_perc",
        "Share of KV blocks of all groups in use, or of rows where these keep states and nothing "
        "else; 1 is all.",
        *_MODEL,
    ),
    _gauge(
        "kv_cache_bytes",
        "Device memory of the KV cache: blocks of all groups, states of all rows and saved ones.",
        *_MODEL,
        "kind",
    ),
    _gauge("kv_cache_used_bytes", "Of these, held by running streams.", *_MODEL, "kind"),
    _counter("prompt_tokens", "Prompt tokens computed or found in the prefix cache.", *_MODEL),
    _counter("prompt_tokens_cached", "Of these, found in the prefix cache.", *_MODEL),
    _counter(
        "prompt_tokens_by_source",
        "Prompt tokens by where their KV came from: local_compute, local_cache_hit, and "
        "external_kv_transfer for the host tier.",
        *_MODEL,
        "source",
    ),
    _counter(
        "prompt_tokens_cached_by_source",
        "Prompt tokens found in a cache, by which: local_cache_hit, external_kv_transfer.",
        *_MODEL,
        "source",
    ),
    _counter(
        "prompt_tokens_recomputed",
        "Last tokens of prompts that were in the prefix cache up to them: one is always computed.",
        *_MODEL,
    ),
    _counter("generation_tokens", "Tokens generated.", *_MODEL),
    _counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", *_MODEL),
    _counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", *_MODEL),
    _counter(
        "external_prefix_cache_queries",
        "Prompt tokens looked up in the host tier, as the pool did not have them.",
        *_MODEL,
    ),
    _counter("external_prefix_cache_hits", "Prompt tokens found in the host tier.", *_MODEL),
    _counter(
        "kv_offload_bytes",
        "KV copied to the host tier (save) and from there to the pool (fill).",
        *_MODEL,
        "direction",
    ),
    _gauge("kv_host_slots", "Slots of the host tier, by state.", *_MODEL, "state"),
    _counter(
        "kv_transfer_bytes", "KV read from other workers, by transport.", *_MODEL, "transport"
    ),
    Metric(
        "kv_transfer_seconds",
        "histogram",
        "One read of KV of another worker.",
        (*_MODEL, "transport"),
        _HOP_S,
    ),
    _counter(
        "kv_store_bytes", "KV moved to stores (write) and from them (read).", *_MODEL, "direction"
    ),
    Metric(
        "kv_store_seconds",
        "histogram",
        "One read or write of KV of stores.",
        (*_MODEL, "direction"),
        _HOP_S,
    ),
    _counter(
        "kv_load_failures",
        "Reads of KV that did not bring all: timeout, refused, lost, checksum, process, missing.",
        *_MODEL,
        "reason",
    ),
    _gauge("kv_leases", "Prompts whose KV is kept for other workers now.", *_MODEL),
    _gauge("kv_leases_expired", "Leases that ended as their reader was not heard of.", *_MODEL),
    _gauge("kv_transfer_restarts", "Times that the transfer process was started again.", *_MODEL),
    _counter("mm_cache_queries", "Media items looked up in the encoder's cache.", *_MODEL),
    _counter("mm_cache_hits", "Media items found in the encoder's cache.", *_MODEL),
    _gauge("mm_cache_bytes", "Embeddings in an encoder's cache.", "engine"),
    _counter(
        "admission_rejections",
        "Requests that a worker's queue had no room for, by the limit in vLLM's words.",
        "model_name",
        "reason",
    ),
    _counter("num_preemptions", "Streams put back to free their KV blocks.", *_MODEL),
    _counter("spec_decode_num_drafts", "Rows of steps that had drafts, of those landed.", *_MODEL),
    _counter("spec_decode_num_draft_tokens", "Tokens that were drafted for them.", *_MODEL),
    _counter("spec_decode_num_accepted_tokens", "Drafts that streams drew as well.", *_MODEL),
    _counter(
        "spec_decode_num_accepted_tokens_per_pos",
        "The same by place among the drafts of a row, from 0.",
        *_MODEL,
        "position",
    ),
    _gauge("spec_decode_index_bytes", "Memory of what drafts are looked up in.", *_MODEL),
    _histogram("iteration_tokens_total", "Tokens computed in one step.", _STEP_TOKENS, *_MODEL),
    _histogram("engine_step_seconds", "One engine step.", _TOKEN_S, *_MODEL),
    _histogram(
        "request_prefill_kv_computed_tokens",
        "Prompt tokens of a stream that were computed.",
        _REQUEST_TOKENS,
        *_MODEL,
    ),
    _histogram("request_num_preemptions", "Preemptions of a stream.", _PREEMPTIONS, *_MODEL),
    _counter("on_demand_sleeps", "Times that a worker on demand went to sleep.", *_MODEL),
    _histogram("request_queue_time_seconds", "Waiting for a row.", _REQUEST_S, *_MODEL),
    _histogram("request_prefill_time_seconds", "From row to first token.", _REQUEST_S, *_MODEL),
    _histogram("request_decode_time_seconds", "From first to last token.", _REQUEST_S, *_MODEL),
    _histogram("request_inference_time_seconds", "Prefill and decode.", _REQUEST_S, *_MODEL),
)
"""Measured by workers (and the mm_cache ones by encoders); gateways show them too."""

_EDGE: Final = (
    _counter("request_success", "Finished choices.", *_MODEL, "finished_reason"),
    _histogram("time_to_first_token_seconds", "HTTP request to first token.", _TTFT_S, *_MODEL),
    _histogram("inter_token_latency_seconds", "Between two tokens of a stream.", _TOKEN_S, *_MODEL),
    _histogram(
        "request_time_per_output_token_seconds", "Mean of a stream's ITL.", _TOKEN_S, *_MODEL
    ),
    _histogram("e2e_request_latency_seconds", "HTTP request to last byte.", _REQUEST_S, *_MODEL),
    _histogram("request_prompt_tokens", "Prompt tokens of a request.", _REQUEST_TOKENS, *_MODEL),
    _histogram(
        "request_generation_tokens", "Generated tokens of a choice.", _REQUEST_TOKENS, *_MODEL
    ),
    _histogram("request_params_max_tokens", "max_tokens of a request.", _REQUEST_TOKENS, *_MODEL),
    _histogram("request_params_n", "n of a request.", _CHOICES, *_MODEL),
    _histogram(
        "request_max_num_generation_tokens",
        "Tokens of a request's longest choice.",
        _REQUEST_TOKENS,
        *_MODEL,
    ),
    _counter("http_requests", "HTTP requests by route and status.", *_ROUTE, "status"),
    _histogram("http_request_duration_seconds", "From first to last byte.", _TTFT_S, *_ROUTE),
    _histogram("http_request_size_bytes", "Body of an HTTP request.", _BODY_BYTES, "handler"),
    _histogram("http_response_size_bytes", "Body of an answer.", _BODY_BYTES, "handler"),
    _counter(
        "refused_connections",
        "Connections closed for what they sent, or how slowly, or for their number.",
        "kind",
    ),
    _counter("recoveries", "Streams placed again, by what was seen.", "reason"),
    _counter("pool_batches", "Batches of prompts that workers have answered with numbers.", "task"),
    _counter("pool_retries", "Such batches placed again, by what was seen.", "reason"),
    _counter(
        "lethal_requests", "Requests refused because processes died of them alone.", "service"
    ),
    _gauge("pool_answer_bytes", "Bytes of gateway.pool_budget_bytes in use."),
    _gauge("workers_left_out", "Workers that this gateway avoids because they lose streams."),
    _counter("placements_unused", "Placements whose client had left; given back at once."),
    _counter("wakes", "Wakes of models on demand: awake, failed.", "model_name", "outcome"),
    _histogram(
        "wake_seconds", "From a request until its model was awake.", _REQUEST_S, "model_name"
    ),
    _counter("resends", "Resend commands after a gap in a stream's offsets."),
    _counter("cancelled_requests", "Requests whose client left."),
    _gauge("websocket_connections_active", "Realtime sessions that are open."),
    _counter("websocket_connections", "Realtime sessions opened."),
    _counter("audio_seconds", "Seconds of recordings that were transcribed.", "model_name"),
    _counter(
        "audio_retries", "Clips that were transcribed at a further temperature.", "model_name"
    ),
    _histogram("websocket_connection_duration_seconds", "A realtime session.", _REQUEST_S),
    _gauge("responses_running", "Responses that this gateway makes now, kept ones and others."),
    _counter(
        "responses_made", "The same that have left it: by status, or why it let go.", "outcome"
    ),
    _counter("responses_adopted", "Responses that this gateway took over.", "reason"),
    _gauge("batches_running", "Batches that this gateway works on."),
    _counter("batches_adopted", "Batches that this gateway took over from a dead one."),
    _counter("batches_ended", "Batches that ended here, by their status.", "status"),
    _counter("batch_requests", "Requests of batches: completed, failed, why not run.", "outcome"),
    _counter("orphaned_files_deleted", "Contents of uploads that had no description."),
    _counter("mcp_questions", "Requests to MCP servers.", "server", "outcome"),
    _counter("tenant_requests", "Requests by tenant: admitted, or why not.", "tenant", "outcome"),
    _counter(
        "tenant_tokens",
        "Tokens charged: prompt, of these cached, image, audio and video; completion.",
        "tenant",
        "kind",
    ),
    _counter(
        "media_tokens",
        "Prompt tokens that stand for media, by modality: image, audio, video.",
        "model_name",
        "modality",
    ),
    _counter("key_file_reloads", "New versions of the key file: loaded, refused.", "outcome"),
    _counter("limits_kept_alone", "Requests judged without Redis, by this gateway's own counts."),
    _gauge("usage_untold_tokens", "Tokens charged that Redis does not know of yet."),
    _counter("usage_batches_lost", "Sums of usage that Redis has refused."),
    _gauge("large_body_bytes", "Bytes of gateway.body_budget_bytes in use."),
    _gauge("open_streams", "Streams that this gateway drives now."),
    _gauge("worker_requests_running", "By its heartbeat: streams in a worker's batch.", *_MODEL),
    _gauge("worker_requests_waiting", "By its heartbeat: streams that wait for a row.", *_MODEL),
    _gauge("worker_kv_cache_usage_perc", "By its heartbeat: share of KV blocks in use.", *_MODEL),
    _gauge("worker_sleep_level", "By its heartbeat: 0 is awake.", *_MODEL),
    _counter("worker_preemptions", "By its heartbeat: streams put back to free KV.", *_MODEL),
    _counter("worker_prefill_tokens", "By its heartbeat: prompt tokens computed.", *_MODEL),
    _counter("worker_decode_tokens", "By its heartbeat: tokens computed while decoding.", *_MODEL),
)
"""Measured by gateways."""

_MESH: Final = (
    _histogram(
        "event_loop_lag_seconds", "How late a timer of the process's event loop goes off.", _HOP_S
    ),
    _counter("actor_messages", "Messages answered by an actor.", "actor", "outcome"),
    _histogram("actor_seconds", "Time in a handler.", _HOP_S, "actor", "message"),
    _gauge("actor_running", "Handlers at work.", "actor"),
    _gauge("actor_waiting", "Messages in the mailbox.", "actor"),
    _counter("bus_complaints", "What went wrong on the bus, by kind.", "kind"),
    _counter("spans_sent", "Spans published on the bus."),
    _counter("spans_dropped", "Spans lost to a full queue, their size, or a lost bus."),
    _gauge("traces_kept", "Traces that this gateway can show."),
    _histogram("placement_seconds", "One placement, waiting included.", _TTFT_S, "model_name"),
    _counter("placements", "Placements by outcome.", "outcome"),
    _counter(
        "placement_reasons",
        "Placements by why that worker: prefix, cost, load, index away.",
        "model_name",
        "reason",
    ),
    _counter(
        "placement_matched_tokens",
        "Prompt tokens that the chosen workers had by the index.",
        "model_name",
    ),
    _histogram(
        "placement_candidate_seconds",
        "Estimated time to first token of each candidate, of a sample of the decisions.",
        _TTFT_S,
        *_MODEL,
    ),
    _gauge("prefix_index_away", "1 while this scheduler places by load alone."),
    _counter("prefix_index_failures", "Lookups in the index without an answer in time."),
    _counter("prefix_index_mends", "Times that what schedulers keep there was not theirs."),
    _gauge("placement_waiting", "Requests that wait for a worker."),
    _gauge("members", "Live processes, as this gateway or scheduler sees them.", "service"),
)
"""Measured by the process that does it."""

METRICS: Final = (*ENGINE_METRICS, *_EDGE, *_MESH)

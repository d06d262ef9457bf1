"""Values of sections that code reads as it reads settings, but that no operator sets.

Each has one value in every mesh. It stands in a section, and not where it is used, where tests
need another one.
"""

from typing import Any, Final

from pydantic import Field, JsonValue
from pydantic.fields import FieldInfo

_MARK: Final[dict[str, JsonValue]] = {"fixed": True}


def fixed(**arguments: Any) -> Any:
    """A Field that no source of settings may set."""
    return Field(json_schema_extra=_MARK, **arguments)


def is_fixed(field: FieldInfo) -> bool:
    """Return whether a field was declared by `fixed`."""
    return field.json_schema_extra == _MARK


MOVED: Final = frozenset(
    (
        "batches.max_lines",
        "batches.max_output_bytes",
        "batches.max_running_per_tenant",
        "batches.retry_max_s",
        "block_events.replay_bytes",
        "bus.clock_skew_s",
        "bus.log_interval_s",
        "bus.max_outstanding_pings",
        "bus.pending_bytes",
        "encoder.speech_state_bytes",
        "gateway.audio_max_compression",
        "gateway.audio_max_no_speech",
        "gateway.audio_min_logprob",
        "gateway.audio_temperatures",
        "gateway.counted_responses_s",
        "gateway.file_sweep_s",
        "gateway.inline_media_bytes",
        "gateway.inline_pool_values",
        "gateway.limits_timeout_s",
        "gateway.max_beam_width",
        "gateway.max_cancel_queue",
        "gateway.max_cancels_known",
        "gateway.max_forced_calls",
        "gateway.max_logprob_token_ids",
        "gateway.max_metric_tenants",
        "gateway.max_metrics_bytes",
        "gateway.max_repetition_pattern",
        "gateway.max_request_id_chars",
        "gateway.max_stop_chars",
        "gateway.max_stop_token_ids",
        "gateway.max_streams",
        "gateway.max_tools_bytes",
        "gateway.max_untold_leases",
        "gateway.ping_again_s",
        "gateway.pool_batches",
        "gateway.realtime_max_recordings_bytes",
        "gateway.realtime_part_s",
        "gateway.refusal_log_interval_s",
        "gateway.requests_per_turn",
        "gateway.usage_kept_days",
        "prefix_index.max_releases",
        "responses.max_chain",
        "responses.max_chain_bytes",
        "responses.max_conversation_bytes",
        "responses.max_input_items",
        "responses.max_mcp_calls_running",
        "responses.max_mcp_tools",
        "responses.read_batch",
        "scheduler.fair_output_tokens",
        "scheduler.fair_quantum_tokens",
        "scheduler.max_retry_after_s",
        "scheduler.reservation_settle_s",
        "scheduler.retry_interval_s",
        "scheduler.worker_queue_share",
        "service.lag_interval_s",
        "service.max_listening_gap_s",
        "service.overloaded_retry_after_s",
        "tokenizer.inline_chars",
        "tokenizer.long_text_chars",
        "tokenizer.max_bad_words",
        "tokenizer.max_documents",
        "tokenizer.max_template_chars",
        "tokenizer.media.max_url_chars",
        "tokenizer.media.max_uuid_chars",
        "tokenizer.media.max_video_pixels",
        "tokenizer.media.url_kept_s",
        "tokenizer.text_queue",
        "up.nats_max_payload_bytes",
        "up.redis_memory_bytes",
        "up.stop_margin_s",
        "up.tail_lines",
        "worker.grammar_shared_max_bytes",
        "worker.grammar_shared_ttl_s",
        "worker.native_spin_us",
        "worker.on_demand.awaited_s",
        "worker.on_demand.slot_poll_s",
        "worker.speech_cache_bytes",
        "worker.stop_wait_s",
    )
)
"""Keys of former settings that are constants in the files that use them."""

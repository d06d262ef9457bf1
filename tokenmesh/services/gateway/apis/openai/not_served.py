"""NOT_SERVED: routes of vLLM that the gateway does not have, and what to do instead."""

from typing import Final

_INSTEAD: Final = {
    ("/v1/systemone", "/v1/decisions"): (
        "ask a chat with structured_outputs.choice, or /generative_scoring for probabilities"
    ),
    ("/collective_rpc", "/get_world_size"): "workers run no code of others",
    (
        *("/init_weight_transfer_engine", "/start_weight_update", "/update_weights"),
        *("/finish_weight_update", "/update_weight_version", "/weight_info"),
    ): "weights are those of the checkpoint; restart workers with another one",
    ("/pause", "/resume", "/is_paused"): "with --enable-admin-routes there are /sleep and /wake_up",
    ("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache"): (
        "a cache_salt keeps a request from older blocks"
    ),
    ("/scale_elastic_ep", "/is_scaling_elastic_ep"): "start and drain workers instead",
}
NOT_SERVED: Final = {
    path: f"a route of vLLM: {hint}" for paths, hint in _INSTEAD.items() for path in paths
}

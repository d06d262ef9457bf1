"""vLLM's flags without a setting here: those without an effect, and unsupported ones.

An error names the flag and what to do; it never guesses another flag by its spelling.
"""

from typing import Final, NamedTuple


class Fixed(NamedTuple):
    """A flag for what TokenMesh always does, or supports with some values only."""

    meaning: str
    values: tuple[str, ...] | None = None
    """What may stand behind it; None: nothing, it is a switch; empty: anything."""


_ONE_DEVICE: Final = "a worker uses one device; --workers N starts N replicas"

FIXED: Final = {
    "chat-template-content-format": Fixed("read from the template", ("auto",)),
    "config-format": Fixed("checkpoints are in Hugging Face's format", ("auto", "hf")),
    "cpu-offload-gb": Fixed("weights are on one device", ("0",)),
    "data-parallel-size": Fixed(_ONE_DEVICE, ("1",)),
    "disable-cascade-attn": Fixed("cascade attention is not implemented"),
    "disable-custom-all-reduce": Fixed("a model uses one device"),
    "disable-log-requests": Fixed("requests are traced, not logged"),
    "disable-log-stats": Fixed("statistics are at GET /metrics, not in the log"),
    "disable-uvicorn-access-log": Fixed("requests are traced, not logged"),
    "enable-auto-tool-choice": Fixed("tool calls are always parsed"),
    "enable-chunked-prefill": Fixed("prefill is always chunked"),
    "enable-prompt-tokens-details": Fixed("usage always has prompt_tokens_details"),
    "enable-request-id-headers": Fixed("X-Request-Id is always sent back"),
    "enable-server-load-tracking": Fixed("GET /load always counts"),
    "enable-ssl-refresh": Fixed("certificates are read again when they change"),
    "fully-sharded-loras": Fixed(_ONE_DEVICE),
    "load-format": Fixed(
        "a checkpoint is read as what it is", ("auto", "hf", "safetensors", "gguf")
    ),
    "logprobs-mode": Fixed("log-probabilities are the model's own", ("raw_logprobs",)),
    "lora-dtype": Fixed("adapters are computed in the model's type", ("auto",)),
    "mamba-cache-mode": Fixed(
        "states are saved at ends of blocks; `worker.saved_states` 0 saves none", ("align",)
    ),
    "nnodes": Fixed("a model uses one machine; more workers may join from others", ("1",)),
    "pipeline-parallel-size": Fixed(_ONE_DEVICE, ("1",)),
    "response-role": Fixed("answers are the assistant's", ("assistant",)),
    "scheduling-policy": Fixed(
        "requests go by their `priority`, then by their arrival", ("fcfs", "priority")
    ),
    "show-hidden-metrics-for-version": Fixed("no metric is hidden", ()),
    "stream-interval": Fixed("a request may set `stream_interval`", ("1",)),
    "task": Fixed("`--runner` and `--convert` choose what a model does", ("auto", "generate")),
    "tensor-parallel-size": Fixed(_ONE_DEVICE, ("1",)),
    "tokenizer-mode": Fixed("tokenizers are Hugging Face's", ("auto", "hf")),
}
"""Taken without any effect; a value that is not named here is refused."""

ADVICE: Final = {
    "api-server-count": "`up --gateways N` runs N of them on one port",
    "allowed-local-media-path": "files of the server are never read for a request",
    "allowed-media-domains": "settings of `tokenizer.media` bound what is fetched",
    "attention-backend": "there is one, chosen by the device; leave the flag out",
    "calculate-kv-scales": "--kv-cache-dtype fp8 takes the checkpoint's scales, int8 makes its own",
    "compilation-config": "kernels are compiled ahead; --enforce-eager turns CUDA graphs off",
    "disable-fastapi-docs": "set `gateway.docs` to false",
    "download-dir": "set the environment variable HF_HOME",
    "enable-expert-parallel": "mixtures of experts are not served",
    "enable-log-outputs": "outputs are not logged",
    "enable-log-requests": "requests are traced, not logged: `tokenmesh trace`",
    "enable-sleep-mode": "--enable-admin-routes serves /sleep and /wake_up",
    "guided-decoding-backend": "use --structured-outputs-config.backend",
    "hf-overrides": "edit the checkpoint's config.json",
    "hf-token": "set the environment variable HF_TOKEN",
    "kv-offloading-size": "the KV cache is on one device",
    "kv-transfer-config": "prefill and decode are not separated",
    "default-mm-loras": "name the adapter as the request's `model`",
    "enable-lora-bias": "adapters with biases are not served; merge them into the checkpoint",
    "enable-tower-connector-lora": "adapters of towers are not served; merge them",
    "lora-target-modules": "every linear layer that an adapter has is served, or it is refused",
    "lora-extra-vocab-size": "adapters with a vocabulary of their own are not served",
    "max-log-len": "requests are traced, not logged; leave the flag out",
    "middleware": "put a proxy in front",
    "optimization-level": "kernels are compiled ahead; --enforce-eager turns CUDA graphs off",
    "override-generation-config": "edit the checkpoint's generation_config.json",
    "profiler-config": "--profiler-dir is where /stop_profile writes, with --enable-admin-routes",
    "reasoning-config": "--reasoning-parser names the parser",
    "rope-scaling": "edit the checkpoint's config.json",
    "speculative-config": "speculative decoding is not implemented; leave the flag out",
    "speculative-model": "speculative decoding is not implemented; leave the flag out",
    "structured-outputs-config": "of its keys there is `backend`",
    "swap-space": "preempted streams are recomputed; leave the flag out",
    "tokenizer-revision": "--revision is the tokenizer's, too",
}
"""What to do instead, for the flags that people have in their scripts."""

SHORT: Final = {
    "-tp": "tensor-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-dp": "data-parallel-size",
    "-asc": "api-server-count",
    "-q": "quantization",
    "-cc": "compilation-config",
    "-sc": "speculative-config",
    "-O": "optimization-level",
    "-n": "nnodes",
    "-r": "node-rank",
}

_OTHERS: Final = """
additional-config all2all-backend allow-credentials allow-deprecated-quantization allowed-headers
allowed-methods attention-config code-revision collect-detailed-traces
data-parallel-address data-parallel-backend data-parallel-hybrid-lb data-parallel-rank
data-parallel-rpc-port data-parallel-size-local data-parallel-start-rank dcp-comm-backend
decode-context-parallel-size default-chat-template-kwargs
disable-access-log-for-endpoints disable-chunked-mm-input disable-frontend-multiprocessing
disable-hybrid-kv-cache-manager disable-nccl-for-dp-sync disable-sliding-window
distributed-executor-backend distributed-timeout-seconds ec-transfer-config enable-dbo enable-eplb
enable-mfu-metrics enable-mm-embeds enable-return-routed-experts
eplb-config exclude-tools-when-tool-choice-none
expert-placement-strategy h11-max-header-count h11-max-incomplete-event-size
headless hf-config-path ignore-patterns interleave-mm-strings io-processor-plugin kernel-config
kv-cache-metrics kv-events-config kv-offloading-backend kv-sharing-fast-prefill
log-config-file log-error-stack logits-processor-pattern logits-processors
mamba-cache-dtype mamba-ssm-cache-dtype
master-addr master-port max-long-partial-prefills max-num-partial-prefills
max-parallel-loading-workers mm-encoder-attn-backend mm-encoder-tp-mode mm-processor-cache-gb
mm-processor-cache-type mm-processor-kwargs mm-shm-cache-max-object-size-mb
model-loader-extra-config node-rank numa-bind override-attention-dtype performance-mode
pooler-config prefill-context-parallel-size prefix-caching-hash-algo pt-load-map-location
ray-workers-use-nsight reasoning-parser-plugin rope-theta safetensors-load-strategy scheduler-cls
scheduler-reserve-full-isl skip-mm-profiling skip-tokenizer-init specialize-active-lora
ssl-cert-reqs ssl-ciphers tool-parser-plugin tool-server use-tqdm-on-load
video-pruning-rate weight-transfer-config worker-cls worker-extension-cls
"""

NAMES: Final = frozenset(ADVICE) | frozenset(FIXED) | frozenset(_OTHERS.split())

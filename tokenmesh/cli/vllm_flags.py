"""vLLM's flags that TokenMesh does not have, so that an error can say so."""

from typing import Final

ADVICE: Final = {
    "tensor-parallel-size": "a worker uses one device; --workers N starts N replicas",
    "pipeline-parallel-size": "a worker uses one device; --workers N starts N replicas",
    "data-parallel-size": "--workers N starts N replicas",
    "api-server-count": "`up --gateways N` runs N of them on one port",
    "enable-chunked-prefill": "prefill is always chunked; leave the flag out",
    "disable-log-requests": "requests are traced, not logged; leave the flag out",
    "disable-log-stats": "see GET /metrics; leave the flag out",
    "trust-remote-code": "code from checkpoints is never run",
    "swap-space": "preempted streams are recomputed; leave the flag out",
    "enable-auto-tool-choice": "tool calls are always parsed; leave the flag out",
    "enable-ssl-refresh": "certificates are read again when they change; leave the flag out",
    "enable-sleep-mode": "--enable-admin-routes serves /sleep and /wake_up",
    "profiler-config": "--profiler-dir is where /stop_profile writes, with --enable-admin-routes",
    "load-format": "checkpoints are read from safetensors; leave the flag out",
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
additional-config all2all-backend allow-credentials allow-deprecated-quantization
allowed-headers allowed-local-media-path allowed-media-domains allowed-methods
attention-backend attention-config calculate-kv-scales chat-template-content-format
code-revision collect-detailed-traces compilation-config config-format convert cpu-offload-gb
data-parallel-address data-parallel-backend data-parallel-hybrid-lb data-parallel-rank
data-parallel-rpc-port data-parallel-size-local data-parallel-start-rank dcp-comm-backend
decode-context-parallel-size default-chat-template-kwargs default-mm-loras
disable-access-log-for-endpoints disable-cascade-attn disable-chunked-mm-input
disable-custom-all-reduce disable-fastapi-docs disable-frontend-multiprocessing
disable-hybrid-kv-cache-manager disable-nccl-for-dp-sync disable-sliding-window
disable-uvicorn-access-log distributed-executor-backend distributed-timeout-seconds
download-dir ec-transfer-config enable-dbo enable-eplb enable-expert-parallel
enable-force-include-usage enable-log-outputs enable-log-requests enable-lora enable-lora-bias
enable-mfu-metrics enable-mm-embeds enable-prompt-tokens-details
enable-request-id-headers enable-return-routed-experts enable-server-load-tracking
enable-tower-connector-lora eplb-config exclude-tools-when-tool-choice-none
expert-placement-strategy fully-sharded-loras guided-decoding-backend h11-max-header-count
h11-max-incomplete-event-size headless hf-config-path hf-overrides hf-token ignore-patterns
interleave-mm-strings io-processor-plugin kernel-config kv-cache-dtype kv-cache-metrics
kv-events-config kv-offloading-backend kv-offloading-size kv-sharing-fast-prefill
kv-transfer-config language-model-only limit-mm-per-prompt log-config-file log-error-stack
logits-processor-pattern logits-processors logprobs-mode lora-dtype lora-modules
lora-target-modules mamba-block-size mamba-cache-dtype mamba-cache-mode mamba-ssm-cache-dtype
master-addr master-port max-cpu-loras max-log-len max-long-partial-prefills max-lora-rank
max-loras max-num-partial-prefills max-parallel-loading-workers middleware
mm-encoder-attn-backend mm-encoder-tp-mode mm-processor-cache-gb mm-processor-cache-type
mm-processor-kwargs mm-shm-cache-max-object-size-mb model-impl model-loader-extra-config nnodes
node-rank numa-bind optimization-level override-attention-dtype override-generation-config
performance-mode pooler-config prefill-context-parallel-size prefix-caching-hash-algo
pt-load-map-location quantization ray-workers-use-nsight reasoning-config
reasoning-parser-plugin response-role return-tokens-as-token-ids rope-scaling rope-theta runner
safetensors-load-strategy scheduler-cls scheduler-reserve-full-isl scheduling-policy
show-hidden-metrics-for-version skip-mm-profiling skip-tokenizer-init specialize-active-lora
speculative-config speculative-model ssl-cert-reqs ssl-ciphers stream-interval
structured-outputs-config task tokenizer-mode tokenizer-revision tokens-only tool-parser-plugin
tool-server use-tqdm-on-load video-pruning-rate weight-transfer-config worker-cls
worker-extension-cls
"""

NAMES: Final = frozenset(ADVICE) | frozenset(_OTHERS.split())

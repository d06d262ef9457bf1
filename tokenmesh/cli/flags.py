"""Flags: one table from command-line names to settings; `up` and `serve` get all of them.

A flag has vLLM's name where it means the same there. Help and type come from the setting, and the
setting validates the value: this module only carries it.
"""

import hashlib
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, get_args

import typer

from tokenmesh.cli.transfer_config import transfer_config
from tokenmesh.shared.config.layers import field_at
from tokenmesh.shared.errors import ConfigError
from tokenmesh.shared.services import SERVICES

_SCALES: Final = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True)
class Flag:
    """A flag and the key it sets."""

    name: str
    key: tuple[str, ...]
    is_switch: bool = False
    """`--x` and `--no-x`."""
    takes_several: bool = False
    convert: Callable[[str], object] = str
    """From the word on the command line to what the setting takes."""
    help: str = ""
    """Where the setting's own description does not fit the flag."""
    alias: str = ""
    """Another name for it."""

    @property
    def parameter(self) -> str:
        """The Python name under which typer hands the value over."""
        return self.name.removeprefix("--").replace("-", "_").replace(".", "_")


def human_number(text: str) -> str:
    """`32k` is 32000 and `32K` is 32768, as in vLLM; anything else stays as it is."""
    digits, scale = text[:-1], _SCALES.get(text[-1:])
    if scale is None or not digits.replace(".", "", 1).isdigit():
        return text
    return str(int(float(digits) * scale))


def json_object(text: str) -> object:
    """The object that a flag's JSON is; text that is none is left to the setting's own error."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def dtype_name(text: str) -> str:
    return {"float": "float32", "half": "float16"}.get(text, text)


def log_level(text: str) -> str:
    """The nearest of our levels to one of uvicorn's."""
    return {"trace": "debug", "critical": "error"}.get(text, text)


def key_hash(text: str) -> str:
    """An API key as the configuration holds it. Raises ConfigError for an empty one."""
    if not text.strip():
        raise ConfigError("--api-key is empty: is the variable set that it was taken from?")
    return hashlib.sha256(text.encode()).hexdigest()


FLAGS: Final = (
    Flag("--model", ("model", "model")),
    Flag(
        "--served-model-name",
        ("model", "served_model_name"),
        takes_several=True,
        help="Names clients may use, the first is canonical; several may follow.",
    ),
    Flag("--tokenizer", ("model", "tokenizer")),
    Flag("--revision", ("model", "revision")),
    Flag("--dtype", ("model", "dtype"), convert=dtype_name),
    Flag("--quantization", ("model", "quantization")),
    Flag("--model-impl", ("model", "model_impl")),
    Flag("--runner", ("model", "runner")),
    Flag("--convert", ("model", "convert")),
    Flag("--pooler-config.pooling-type", ("model", "pooling_type"), convert=str.upper),
    Flag("--pooler-config.task", ("model", "pooling_task")),
    Flag("--pooler-config.use-activation", ("model", "pooling_activation")),
    Flag("--pooler-config.enable-chunked-processing", ("model", "embed_in_chunks")),
    Flag("--pooler-config.max-embed-len", ("model", "max_embed_len")),
    Flag("--hf-overrides", ("model", "hf_overrides"), convert=json_object),
    Flag("--trust-remote-code", ("model", "trust_remote_code"), is_switch=True),
    Flag("--max-model-len", ("model", "max_model_len"), convert=human_number),
    Flag(
        "--reasoning-parser",
        ("model", "reasoning_parser"),
        alias="--reasoning-config.reasoning-parser",
    ),
    Flag("--reasoning-config.reasoning-end-str", ("model", "reasoning_end_str")),
    Flag("--tool-call-parser", ("model", "tool_call_parser")),
    Flag("--chat-template", ("model", "chat_template")),
    Flag(
        "--allow-special-tokens-in-content",
        ("model", "allow_special_tokens_in_content"),
        is_switch=True,
    ),
    Flag("--generation-config", ("model", "generation_config")),
    Flag(
        "--override-generation-config",
        ("model", "override_generation_config"),
        convert=json_object,
    ),
    Flag("--speculative-config", ("model", "speculative_config"), convert=json_object),
    Flag("--spec-method", ("model", "speculative_config", "method")),
    Flag("--spec-model", ("model", "speculative_config", "model")),
    Flag("--spec-tokens", ("model", "speculative_config", "num_speculative_tokens")),
    Flag("--language-model-only", ("model", "language_model_only"), is_switch=True),
    Flag("--limit-mm-per-prompt", ("model", "limit_mm_per_prompt"), convert=json_object),
    Flag("--on-demand", ("model", "on_demand"), is_switch=True),
    Flag("--keep-alive", ("model", "keep_alive")),
    Flag("--trust-request-chat-template", ("tokenizer", "trust_request_chat_template"), True),
    Flag(
        "--allowed-media-domains",
        ("tokenizer", "media", "allowed_domains"),
        takes_several=True,
        help="Hosts that media are fetched from; several may follow.",
    ),
    Flag("--engine", ("worker", "engine")),
    Flag("--tensor-parallel-size", ("worker", "tensor_parallel_size")),
    Flag("--pipeline-parallel-size", ("worker", "pipeline_parallel_size")),
    Flag("--enable-expert-parallel", ("worker", "enable_expert_parallel"), is_switch=True),
    Flag("--enable-eplb", ("worker", "enable_eplb"), is_switch=True),
    Flag("--eplb-config", ("worker", "eplb_config"), convert=json_object),
    Flag("--max-num-seqs", ("worker", "max_num_seqs")),
    Flag(
        "--max-num-batched-tokens",
        ("worker", "max_num_batched_tokens"),
        convert=human_number,
    ),
    Flag(
        "--long-prefill-token-threshold",
        ("worker", "long_prefill_token_threshold"),
        convert=human_number,
    ),
    Flag("--async-scheduling", ("worker", "async_scheduling"), is_switch=True),
    Flag("--device", ("worker", "device")),
    Flag("--enforce-eager", ("worker", "enforce_eager"), is_switch=True),
    Flag(
        "--max-cudagraph-capture-size",
        ("worker", "max_cudagraph_capture_size"),
        convert=human_number,
    ),
    Flag("--batch-invariant", ("worker", "batch_invariant"), is_switch=True),
    Flag("--structured-outputs-config.backend", ("worker", "structured_outputs_backend")),
    Flag("--block-size", ("worker", "block_size")),
    Flag("--kv-cache-dtype", ("worker", "kv_cache_dtype")),
    Flag("--enable-prefix-caching", ("worker", "enable_prefix_caching"), is_switch=True),
    Flag("--mamba-block-size", ("worker", "mamba_block_size"), convert=human_number),
    Flag(
        "--num-gpu-blocks-override",
        ("worker", "num_gpu_blocks_override"),
        alias="--num-kv-blocks",
    ),
    Flag("--kv-cache-memory-bytes", ("worker", "kv_cache_memory_bytes"), convert=human_number),
    Flag("--kv-offloading-size", ("worker", "kv_offloading_size")),
    Flag("--kv-disk-dir", ("worker", "kv", "disk_dir")),
    Flag("--kv-disk-size", ("worker", "kv", "disk_size")),
    Flag("--kv-transfer-config", ("worker", "kv"), convert=transfer_config),
    Flag("--gpu-memory-utilization", ("worker", "gpu_memory_utilization")),
    Flag("--cpu-memory-utilization", ("worker", "cpu_memory_utilization")),
    Flag(
        "--profiler-dir",
        ("worker", "profiler_dir"),
        alias="--profiler-config.torch-profiler-dir",
    ),
    Flag("--logprobs-mode", ("worker", "logprobs_mode")),
    Flag("--enable-lora", ("worker", "lora", "enable_lora"), is_switch=True),
    Flag(
        "--lora-modules",
        ("worker", "lora", "lora_modules"),
        takes_several=True,
        help="name=path of adapters that are there from the start; several may follow.",
    ),
    Flag("--max-loras", ("worker", "lora", "max_loras")),
    Flag("--max-cpu-loras", ("worker", "lora", "max_cpu_loras")),
    Flag("--max-lora-rank", ("worker", "lora", "max_lora_rank")),
    Flag("--lora-dir", ("worker", "lora", "lora_dir")),
    Flag(
        "--lora-allowed-dirs",
        ("worker", "lora", "allowed_dirs"),
        takes_several=True,
        help="Directories of which /v1/load_lora_adapter may load; several may follow.",
    ),
    Flag("--kv-events-config.enable-kv-cache-events", ("block_events", "enabled")),
    Flag("--kv-events-config.buffer-steps", ("block_events", "replay_batches")),
    Flag("--keys-file", ("gateway", "keys_file")),
    Flag("--enable-admin-routes", ("gateway", "admin_routes"), is_switch=True),
    Flag("--enable-tokenizer-info-endpoint", ("gateway", "tokenizer_info"), is_switch=True),
    Flag("--enable-scale-out", ("gateway", "scale_out"), is_switch=True),
    Flag("--render-only", ("gateway", "render_only"), is_switch=True),
    Flag("--tokens-only", ("gateway", "tokens_only"), is_switch=True),
    Flag("--enable-prompt-embeds", ("gateway", "prompt_embeds"), is_switch=True),
    Flag("--enable-force-include-usage", ("gateway", "force_include_usage"), is_switch=True),
    Flag(
        "--tool-parser-plugin",
        ("gateway", "parser_files"),
        takes_several=True,
        alias="--reasoning-parser-plugin",
    ),
    Flag("--cohere-is-reasoning-model", ("gateway", "cohere_is_reasoning_model"), is_switch=True),
    Flag("--return-tokens-as-token-ids", ("gateway", "return_tokens_as_token_ids"), is_switch=True),
    Flag("--host", ("gateway", "host")),
    Flag("--port", ("gateway", "port")),
    Flag("--uds", ("gateway", "uds")),
    Flag("--reuse-port", ("gateway", "reuse_port"), is_switch=True),
    Flag("--root-path", ("gateway", "root_path")),
    Flag("--ssl-certfile", ("gateway", "ssl_certfile")),
    Flag("--ssl-keyfile", ("gateway", "ssl_keyfile")),
    Flag("--ssl-ca-certs", ("gateway", "ssl_ca_certs")),
    Flag(
        "--allowed-origins",
        ("gateway", "cors_origins"),
        takes_several=True,
        help="Origins whose pages may call the API, * for all; several may follow.",
    ),
    Flag("--sse-keep-alive-interval", ("gateway", "sse_keep_alive_s")),
    Flag(
        "--api-key",
        ("gateway", "api_key_hashes"),
        takes_several=True,
        convert=key_hash,
        help="A key that clients may use; several may follow.",
    ),
    Flag("--seed", ("gateway", "seed")),
    Flag("--max-logprobs", ("gateway", "max_logprobs")),
    Flag("--shutdown-timeout", ("service", "drain_grace_s")),
    Flag("--uvicorn-log-level", ("telemetry", "log_level"), convert=log_level),
    Flag("--nats", ("bus", "url")),
    Flag("--redis", ("redis", "url")),
    Flag("--metrics-prefix", ("telemetry", "metrics_prefix")),
    Flag("--otlp-traces-endpoint", ("telemetry", "otlp_endpoint")),
)

_VLLM_COUNTS: Final = {"gateway": "--api-server-count", "worker": "--data-parallel-size"}
"""vLLM's names for the numbers of processes; its ranks of data parallelism are replicas."""

UP_FLAGS: Final = (
    *FLAGS,
    *(
        Flag(
            f"--{spec.count_setting}",
            ("up", spec.count_setting),
            alias=_VLLM_COUNTS.get(spec.name, ""),
        )
        for spec in SERVICES
    ),
    Flag("--prefill-workers", ("up", "prefill_workers")),
    Flag("--max-awake-models", ("up", "max_awake_models")),
    Flag("--strict", ("up", "strict"), is_switch=True),
)


def with_flags(command: Callable[..., None], flags: Sequence[Flag]) -> Callable[..., None]:
    """Give a typer command these flags; it receives them as `overrides` for load_settings.

    Values stay text: the settings validate them, with the same errors for every source.
    """

    def run(**values: Any) -> None:
        overrides: dict[str, dict[str, Any]] = {}
        for flag in flags:
            value = values.pop(flag.parameter)
            if value is not None and value != []:
                section: dict[str, Any] = overrides
                for part in flag.key[:-1]:
                    section = section.setdefault(part, {})
                    if not isinstance(section, dict):
                        raise ConfigError(f"{part} is a JSON object", param=part)
                section[flag.key[-1]] = _converted(flag, value)
        command(overrides=overrides, **values)

    own = inspect.signature(command).parameters.values()
    parameters = [each for each in own if each.name != "overrides"]
    parameters += [_parameter(flag) for flag in flags]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {}
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    )
    return run


_OF_ONE_MODEL: Final = frozenset(("model", "served_model_name", "tokenizer", "revision"))


def name_models(overrides: dict[str, Any], positional: Sequence[str]) -> None:
    """`up MODEL` and `up --model MODEL` are the same; of several each gets the flags of models.

    Raises ConfigError when `--model` names another one, and for flags that fit one model only.
    """
    if not positional:
        return
    if len(positional) > 1:
        shared = overrides.pop("model", {})
        for name in sorted(_OF_ONE_MODEL & shared.keys()):
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} is for one model: use [[models]] in --config", param=flag)
        overrides["models"] = [{**shared, "model": each} for each in dict.fromkeys(positional)]
        return
    model = overrides.setdefault("model", {})
    if model.setdefault("model", positional[0]) != positional[0]:
        what = f"two models: {positional[0]} and --model {model['model']}"
        raise ConfigError(what, param="--model")


def _converted(flag: Flag, value: Any) -> object:
    if flag.is_switch:
        return value
    if flag.takes_several:
        return [flag.convert(each) for each in value]
    return flag.convert(value)


def _parameter(flag: Flag) -> inspect.Parameter:
    field = field_at(flag.key)
    kind: object = bool if flag.is_switch else list[str] if flag.takes_several else str
    names = [flag.name] + ([flag.alias] if flag.alias else [])
    if flag.is_switch:
        names = [f"{flag.name}/--no-{flag.name.removeprefix('--')}"]
    option = typer.Option(
        *names,
        help=flag.help or field.description,
        metavar=None if flag.is_switch else _metavar(field.annotation),
        show_default=False,
    )
    return inspect.Parameter(
        flag.parameter,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],  # type: ignore[operator]
    )


def _metavar(annotation: object) -> str:
    """Return the placeholder of the value in the help: the choices, or a letter for the type."""
    kinds = [each for each in (get_args(annotation) or (annotation,)) if each is not type(None)]
    if all(isinstance(each, str) for each in kinds):
        return "|".join(map(str, kinds))
    return {int: "N", float: "X"}.get(kinds[0], "TEXT") if isinstance(kinds[0], type) else "TEXT"

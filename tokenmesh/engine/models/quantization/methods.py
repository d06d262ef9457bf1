"""quantization_config of the other methods -> Quantization."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import torch

from tokenmesh.engine.models.quantization.compressed_tensors import UNAPPLIED
from tokenmesh.engine.models.quantization.rules import (
    ALL,
    Named,
    Quantization,
    Rule,
    choose,
    expression,
    plain,
    refuse_unknown,
    skipped,
    wildcards,
)
from tokenmesh.engine.models.raw_config import RawConfig
from tokenmesh.kernels.linear.formats import (
    E8M0,
    MXFP4_GROUP,
    NVFP4_GROUP,
    WHOLE,
    Awq,
    Bnb4,
    Bnb8,
    Format,
    Fp4,
    Gptq,
    Mxfp4Experts,
    Scaled,
)
from tokenmesh.kernels.linear.formats.gguf import LAYOUTS, GgufBlocks
from tokenmesh.kernels.linear.formats.parts import FLOATS

_ALWAYS_HARMLESS: Final = ("quant_method", "dequantize")
_SKIPPED: Final = "modules_to_not_convert"


def read_fp8(raw: RawConfig) -> Quantization:
    """One scale for each tensor, or for each block."""
    choose(raw, "fmt", "e4m3", "float8_e4m3fn", fallback="e4m3")
    choose(raw, "expert_dtype", "fp8", fallback="fp8")
    choose(raw, "activation_scheme", "dynamic", "static", fallback="dynamic")
    raw.get("scale_fmt")
    sizes = raw.sequence("weight_block_size", 2)
    tile = (WHOLE, WHOLE)
    if sizes is not None:
        if not all(type(size) is int and size > 0 for size in sizes):
            raise raw.error("weight_block_size", f"is {sizes!r}, not rows and columns of a block")
        tile = (sizes[0], sizes[1])
    form = Scaled(
        tile=tile,
        scales=("weight_scale_inv", "weight_scale"),
        scale_types=(*FLOATS, torch.float8_e8m0fnu),
        rounds_inputs=True,
    )
    ignored = [*skipped(raw, _SKIPPED), *skipped(raw, "ignored_layers")]
    refuse_unknown(raw, (*_ALWAYS_HARMLESS, "kv_cache_scheme"))
    rules = (*plain(ignored), (ALL, form))
    return Quantization(raw.origin, rules, UNAPPLIED | {"activation_scale"})


def read_fbgemm(raw: RawConfig) -> Quantization:
    """One scale for each row."""
    ignored = plain(skipped(raw, _SKIPPED))
    refuse_unknown(raw, (*_ALWAYS_HARMLESS, "activation_scale_ub"))
    form = Scaled(tile=(1, WHOLE), rounds_inputs=True)
    return Quantization(raw.origin, (*ignored, (ALL, form)), frozenset({"input_scale_ub"}))


_MODELOPT: Final[Mapping[str, Format]] = {
    "FP8": Scaled(rounds_inputs=True),
    "FP8_PER_CHANNEL_PER_TOKEN": Scaled(tile=(1, WHOLE), rounds_inputs=True),
    "NVFP4": Fp4("weight", NVFP4_GROUP, "weight_scale_2"),
    "MXFP8": Scaled(tile=(1, MXFP4_GROUP), scale_types=E8M0, rounds_inputs=True),
}


def read_modelopt(raw: RawConfig) -> Quantization:
    """As config.json or hf_quant_config.json has it; the scales in the files are the truth."""
    algorithm = choose(raw, "quant_algo", *_MODELOPT)
    form = _MODELOPT[algorithm]
    if algorithm == "NVFP4":
        choose(raw, "group_size", NVFP4_GROUP, fallback=NVFP4_GROUP)
    if algorithm == "MXFP8":
        choose(raw, "group_size", MXFP4_GROUP, fallback=MXFP4_GROUP)
    ignored = [*wildcards(raw, "exclude_modules"), *wildcards(raw, "ignore")]
    harmless = ("producer", "config_groups", "kv_cache_scheme", "kv_cache_quant_algo")
    refuse_unknown(raw, (*_ALWAYS_HARMLESS, *harmless))
    return Quantization(raw.origin, (*plain(ignored), (ALL, form)), UNAPPLIED)


_GPTQ_HARMLESS: Final = (
    *("sym", "static_groups", "true_sequential", "damp_percent", "damp_auto_increment", "mse"),
    *("lm_head", "model_name_or_path", "model_file_base_name", "meta", "quantizer", "dataset"),
    *("tokenizer", "block_name_to_quantize", "modules_in_block_to_quantize", "model_seqlen"),
    *("module_name_preceding_first_block", "batch_size", "pad_token_id", "max_input_length"),
    *("cache_block_outputs", "use_cuda_fp16", "use_exllama", "exllama_config", "backend"),
    *("disable_exllama", "act_group_aware", "parallel_packing", "version", "hyb_act", "gptaq"),
    *("gptaq_alpha", "foem", "failsafe", "fallback", "offload_to_disk", "offload_to_disk_path"),
    *("gc_mode", "vram_strategy", "compute_device_filter", "wait_for_submodule_finalizers"),
    *("auto_forward_data_parallel", "mock_quantization", "process", "uuid"),
)
"""Keys about how the numbers were found and which kernels run them elsewhere."""


def read_gptq(raw: RawConfig) -> Quantization:
    """With the exceptions of `dynamic`: "-:" modules are plain, others have separate values."""
    key = "checkpoint_format" if raw.get("checkpoint_format") is not None else "format"
    stored = choose(raw, key, "gptq", "gptq_v2", fallback="gptq")
    choose(raw, "method", "gptq", fallback="gptq")
    choose(raw, "is_marlin_format", False, fallback=False)
    choose(raw, "pack_dtype", "int32", fallback="int32")
    form = Gptq(
        bits=choose(raw, "bits", 2, 3, 4, 8),
        group_size=raw.integer("group_size", -1, minimum=-1),
        has_order=raw.flag("desc_act"),
        zero_offset=0 if stored == "gptq_v2" else 1,
    )
    rules = (*_dynamic(raw, form), *plain(skipped(raw, _SKIPPED)), (ALL, form))
    refuse_unknown(raw, (*_ALWAYS_HARMLESS, *_GPTQ_HARMLESS))
    return Quantization(raw.origin, rules)


def _dynamic(raw: RawConfig, form: Gptq) -> list[Rule]:
    dynamic = raw.part("dynamic")
    if dynamic is None:
        return []
    found: list[Rule] = []
    for key in dynamic.values:
        pattern = expression(dynamic, key, re.sub(r"\A[+-]:", "", key))
        if key.startswith("-:"):
            found.append((pattern, None))
            continue
        own = dynamic.part(key) or RawConfig({}, dynamic.origin)
        changed = replace(
            form,
            bits=choose(own, "bits", 2, 3, 4, 8, fallback=form.bits),
            group_size=own.integer("group_size", form.group_size, minimum=-1),
            has_order=own.flag("desc_act", form.has_order),
        )
        choose(own, "pack_dtype", "int32", fallback="int32")
        refuse_unknown(own, _GPTQ_HARMLESS)
        found.append((pattern, changed))
    return found


def read_awq(raw: RawConfig) -> Quantization:
    """In the layout of the kernels named gemm."""
    version = raw.get("version")
    if isinstance(version, str) and version.lower() != "gemm":
        raise raw.error("version", f"is {version!r}; supported is 'gemm'")
    for key in ("bits", "w_bit"):
        choose(raw, key, 4, fallback=4)
    choose(raw, "zero_point", True, fallback=True)
    size = raw.integer("group_size", raw.integer("q_group_size", 128, minimum=-1), minimum=-1)
    ignored = plain(skipped(raw, _SKIPPED))
    harmless = ("backend", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config")
    refuse_unknown(raw, (*_ALWAYS_HARMLESS, *harmless))
    return Quantization(raw.origin, (*ignored, (ALL, Awq(size))))


_BNB_HARMLESS: Final = (
    *("llm_int8_threshold", "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight"),
    *("bnb_4bit_compute_dtype", "bnb_4bit_use_double_quant", "_load_in_4bit", "_load_in_8bit"),
)


def read_bitsandbytes(raw: RawConfig) -> Quantization:
    """4 bits or int8, weights that were saved after they had been quantized."""
    is_4bit, is_8bit = raw.flag("load_in_4bit"), raw.flag("load_in_8bit")
    if is_4bit == is_8bit:
        raise raw.error("load_in_4bit", f"and load_in_8bit are both {is_4bit}")
    form: Format = Bnb8()
    if is_4bit:
        form = Bnb4(choose(raw, "bnb_4bit_quant_type", "nf4", "fp4", fallback="fp4"))
        choose(raw, "bnb_4bit_quant_storage", "uint8", fallback="uint8")
    ignored = plain(skipped(raw, "llm_int8_skip_modules"))
    unused = ("bnb_4bit_quant_type", "bnb_4bit_quant_storage")
    refuse_unknown(raw, (*_ALWAYS_HARMLESS, *_BNB_HARMLESS, *unused))
    return Quantization(raw.origin, (*ignored, (ALL, form)))


def read_mxfp4(raw: RawConfig) -> Quantization:
    skipped(raw, _SKIPPED)
    refuse_unknown(raw, _ALWAYS_HARMLESS)
    return Quantization(raw.origin, (), stacks=Mxfp4Experts())


def read_gguf(raw: RawConfig) -> Quantization:
    """The type of each module's blocks, as a GGUF file that was unpacked has them."""
    types = raw.part("types")
    if types is None:
        raise raw.error("types", "is missing")
    by_type: dict[str, set[str]] = {}
    for module in types.values:
        by_type.setdefault(choose(types, module, *LAYOUTS), set()).add(module)
    experts = choose(raw, "experts", "mxfp4", "", fallback="")
    refuse_unknown(raw, _ALWAYS_HARMLESS)
    rules = tuple((Named(frozenset(own)), GgufBlocks(kind)) for kind, own in by_type.items())
    return Quantization(raw.origin, rules, stacks=Mxfp4Experts() if experts else None)

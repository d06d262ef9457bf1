"""Reads a GGUF file as transformers does, and writes the same model in another type."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

_CHUNK = 1024
"""Tokens whose log probabilities are in memory: 1 GB with the largest vocabulary."""


def model_of(file: Path, config: Any = None) -> Any:
    """In float32. `config`: of a file of the same model, where that was read before."""
    config = config or AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    # from_pretrained would do the same and asks for a library that it does not need for it
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    read = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)
    missing, unexpected = model.load_state_dict(read["tensors"], strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    assert config.tie_word_embeddings
    model.tie_weights()
    return model


@torch.inference_mode()
def logprobs_of(model: Any, ids: list[int]) -> tuple[torch.Tensor, list[int]]:
    """Return log probabilities after the first token, and the most likely tokens there."""
    whole = torch.tensor([ids])
    hidden = model.model(whole).last_hidden_state[0, :-1]
    chosen, best = [], []
    for start in range(0, len(hidden), _CHUNK):
        rows = model.lm_head(hidden[start : start + _CHUNK]).log_softmax(-1)
        targets = whole[0, start + 1 : start + 1 + len(rows), None]
        chosen.append(rows.gather(1, targets)[:, 0])
        best += rows.argmax(-1).tolist()
    return torch.cat(chosen), best


def tokenizer_of(file: Path) -> Tokenizer:
    """The one that transformers makes of the file."""
    architecture, values, _ = get_gguf_tokenizer(str(file))
    tokenizer: Tokenizer = convert_gguf_tokenizer(architecture, values)[0]
    return tokenizer


def with_single_digits(tokenizer: Tokenizer) -> Tokenizer:
    """As SmolLM2's own tokenizer.json cuts text. transformers does not know `smollm`, the name of
    this in a GGUF file, and cuts as GPT-2 does; llama.cpp cuts as the model's own file."""
    other: Tokenizer = Tokenizer.from_str(tokenizer.to_str())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = pre_tokenizers.Digits(individual_digits=True)
    other.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    return other


def copy_as(file: Path, kind: str, target: Path) -> Path:
    """Every matrix in one type of blocks, everything else as it is."""
    import gguf  # transformers does so for each file, too

    reader, wanted = gguf.GGUFReader(file), gguf.GGMLQuantizationType[kind]
    architecture = reader.fields["general.architecture"].contents()
    partial = target.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, architecture)
    for name, field in reader.fields.items():
        if name == "general.architecture" or name.startswith("GGUF."):
            continue
        inner = field.types[1] if len(field.types) > 1 else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type)
        if numbers.ndim == 2:
            blocks = gguf.quantize(numbers, wanted)
            writer.add_tensor(tensor.name, blocks, raw_dtype=wanted)
        else:
            writer.add_tensor(tensor.name, np.ascontiguousarray(numbers, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    shutil.move(partial, target)
    return target

"""llama.cpp's input and output: the file it reads, the line it prints."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.peers.gguf_file import tensor_name, write_gguf
from benchmarks.peers.llama_cpp import LlamaCpp, read_report

CONFIG = {
    "model_type": "qwen2",
    "vocab_size": 5,
    "num_hidden_layers": 1,
    "max_position_embeddings": 64,
    "hidden_size": 3,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0},
}
TENSORS = {
    "model.embed_tokens.weight": (5, 3),
    "model.layers.0.self_attn.q_proj.bias": (3,),
    "model.layers.0.mlp.down_proj.weight": (3, 8),
    "model.norm.weight": (3,),
}


def write_checkpoint(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Numbers that bfloat16 holds exactly, as float32."""
    header: dict[str, Any] = {}
    data = b""
    numbers = {}
    for name, shape in TENSORS.items():
        values = (np.arange(np.prod(shape), dtype="<f4") - 2).reshape(shape)
        half = (values.view("<u4") >> 16).astype("<u2").tobytes()
        header[name] = {
            "dtype": "BF16",
            "shape": shape,
            "data_offsets": [len(data), len(data) + len(half)],
        }
        data += half
        numbers[name] = values
    encoded = json.dumps(header).encode()
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return numbers


class Reader:
    """Reads GGUF as its specification has it."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, layout: str) -> tuple[Any, ...]:
        found = struct.unpack_from("<" + layout, self._data, self._at)
        self._at += struct.calcsize("<" + layout)
        return found

    def text(self) -> str:
        (length,) = self.take("Q")
        self._at += length
        return self._data[self._at - length : self._at].decode()

    def file(self) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
        magic, version, num_tensors, num_keys = self.take("4sIQQ")
        assert (magic, version) == (b"GGUF", 3)
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key, (kind,) = self.text(), self.take("I")
            metadata[key] = self.text() if kind == 8 else self.take({4: "I", 6: "f"}[kind])[0]
        tensors = [self._entry() for _ in range(num_tensors)]
        start = -(-self._at // 32) * 32
        arrays = {name: self._array(start + at, shape, kind) for name, at, shape, kind in tensors}
        return metadata, arrays

    def _entry(self) -> tuple[str, int, tuple[int, ...], int]:
        name, (num_dimensions,) = self.text(), self.take("I")
        shape = self.take("Q" * num_dimensions)[::-1]
        kind, offset = self.take("IQ")
        assert offset % 32 == 0
        return name, offset, shape, kind

    def _array(self, at: int, shape: tuple[int, ...], kind: int) -> np.ndarray[Any, Any]:
        count = int(np.prod(shape))
        if kind == 0:
            return np.frombuffer(self._data, "<f4", count, at).reshape(shape)
        assert kind == 30
        half = np.frombuffer(self._data, "<u2", count, at).astype("<u4") << 16
        return half.view("<f4").reshape(shape)


def test_a_gguf_file_holds_the_weights_and_the_sizes(tmp_path: Path) -> None:
    numbers = write_checkpoint(tmp_path)
    write_gguf(tmp_path, tmp_path / "model.gguf")
    metadata, tensors = Reader((tmp_path / "model.gguf").read_bytes()).file()
    assert metadata["general.architecture"] == "qwen2"
    assert metadata["tokenizer.ggml.model"] == "none"
    assert metadata["qwen2.embedding_length"] == 3
    assert metadata["qwen2.attention.head_count_kv"] == 1
    assert metadata["qwen2.rope.freq_base"] == 10000.0
    assert {*tensors} == {
        "token_embd.weight",
        "blk.0.attn_q.bias",
        "blk.0.ffn_down.weight",
        "output_norm.weight",
    }
    for name, values in numbers.items():
        np.testing.assert_array_equal(tensors[tensor_name(name)], values)


@pytest.mark.parametrize("name", ["model.layers.0.mlp.experts.weight", "visual.proj.weight"])
def test_a_tensor_that_llama_would_not_know_is_an_error(name: str) -> None:
    with pytest.raises(KeyError):
        tensor_name(name)


REPORT = b'noise\n{"pp": 128, "tg": 64, "pl": 8, "t_pp": 1.5, "t_tg": 2.5, "speed": 1.0}\n'


def test_its_report_becomes_a_sample() -> None:
    sample = read_report(REPORT, (8, 128, 64))
    assert sample.tokens_per_s == 8 * 64 / 4.0
    assert sample.decode_tokens_per_s == round(8 * 64 / 2.5, 2)
    assert sample.ttft_p50_ms == 1500.0


@pytest.mark.parametrize("said", [b"", b"failed to load model\n", REPORT])
def test_no_report_or_another_ones_is_an_error(said: bytes) -> None:
    with pytest.raises(RuntimeError, match="no report"):
        read_report(said, (4, 128, 64))


def program(folder: Path, before: str) -> LlamaCpp:
    """One that prints a report made of its own arguments, after the line of shell `before`."""
    path = folder / "llama-batched-bench"
    path.write_text(
        "#!/bin/sh\n"
        "while [ $# -gt 1 ]; do case $1 in -npp) pp=$2;; -ntg) tg=${2%,*};; -npl) pl=$2;; esac\n"
        f"shift; done\n{before}\n"
        'echo "{\\"pp\\": $pp, \\"tg\\": $tg, \\"pl\\": $pl, \\"t_pp\\": 1, \\"t_tg\\": 1}"\n'
    )
    path.chmod(0o755)
    return LlamaCpp(path, folder / "model.gguf", 2, {"PATH": "/usr/bin:/bin"}, 10.0)


async def test_the_program_is_reported_what_to_run(tmp_path: Path) -> None:
    sample = await program(tmp_path, "").measure([[1] * 12] * 3, 6)
    assert sample.tokens_per_s == 9.0


async def test_a_program_that_never_reports_is_an_error_with_its_words(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no such model"):
        await program(tmp_path, "echo no such model; exit 1").measure([[1] * 12] * 3, 6)

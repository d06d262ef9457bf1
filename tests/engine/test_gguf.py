"""Models out of GGUF files: the numbers of their blocks, names and tokenizers; broken files."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from tests.fakes import gguf
from tests.fakes.engine_driver import EngineDriver, Job
from tests.fakes.general_models import HEADS
from tests.fakes.models import Fake, make_fake
from tests.fakes.tiny import prompt_of
from tokenmesh.kernels.linear.formats.gguf import LAYOUTS, GgufBlocks
from tokenmesh.services.tokenizer_svc.loading import load_model
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.errors import CheckpointError
from tokenmesh.shared.gguf.unpack import unpacked
from tokenmesh.shared.messages.sampling import SamplingParams

SIZES: Final = {"intermediate_size": 96, "num_hidden_layers": 2}
IQ4: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
SCORED: Final = SamplingParams(seed=0, max_tokens=8, temperature=0.0, prompt_logprobs=1)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "cache")


def bytes_tokens(size: int) -> dict[str, Any]:
    """A vocabulary of bytes and a few merges, filled up to `size`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["he", "ll", "hell", "Ġw", "or", "Ġwor", "12"]
    tokens = [*alphabet, *words, "<|begin|>", "<|end|>"]
    unused = [f"<unused{i}>" for i in range(size - len(tokens))]
    kinds = [1] * (len(tokens) - 2) + [3, 3] + [5] * len(unused)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens + unused,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": ["h e", "l l", "he ll", "Ġ w", "o r", "Ġw or", "1 2"],
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
        "tokenizer.chat_template": "{{ messages }}",
    }


def mixed(name: str, weight: torch.Tensor) -> gguf.Encoded:
    """Another type for each projection, some of q, k and v unlike."""
    part = name.rpartition(".weight")[0].rpartition(".")[2]
    kinds: dict[str, Callable[[torch.Tensor], gguf.Encoded]] = {
        **{"q_proj": gguf.q8_0, "k_proj": gguf.q8_0, "v_proj": gguf.q4_0},
        **{"o_proj": gguf.half, "down_proj": gguf.brain, "embed_tokens": gguf.q8_0},
    }
    return kinds.get(part, gguf.q4_0)(weight)


@pytest.mark.parametrize(
    ("arch", "name"), [("llama", "Llama"), ("qwen2", "Qwen2"), ("qwen3", "Qwen3")]
)
def test_a_model_computes_what_its_blocks_stand_for(
    tmp_path: Path, folder: str, arch: str, name: str
) -> None:
    source = tmp_path / "source"
    make_fake(Fake(name, {**SIZES, "vocab_size": 320}), HEADS).save_pretrained(source)
    file = tmp_path / "model.gguf"
    plain = gguf.write_model(source, file, arch, mixed, bytes_tokens(320))
    directory = unpacked(file, folder)
    assert unpacked(file, folder) == directory
    save_file(plain, source / "model.safetensors", metadata={"format": "pt"})
    seen = []
    for each in (directory, source):
        (result,) = EngineDriver(each).run([Job([i % 300 for i in prompt_of(40)], SCORED)])
        assert result.error is None
        assert result.prompt_logprobs is not None
        logprobs = [each.logprob for each in result.prompt_logprobs if each is not None]
        seen.append((result.token_ids, torch.tensor(logprobs)))
    assert seen[0][0] == seen[1][0]
    torch.testing.assert_close(seen[0][1], seen[1][1], atol=1e-4, rtol=0)


def split_model(tmp_path: Path) -> tuple[Path, Path]:
    """One model: a file, and the first of three that it is split into."""
    source = tmp_path / "source"
    make_fake(Fake("Llama", {**SIZES, "vocab_size": 320}), HEADS).save_pretrained(source)
    gguf.write_model(source, tmp_path / "m.gguf", "llama", mixed, bytes_tokens(320))
    gguf.write_model(source, tmp_path / "m.gguf", "llama", mixed, bytes_tokens(320), parts=3)
    return tmp_path / "m.gguf", tmp_path / "m-00001-of-00003.gguf"


def test_a_model_in_several_files_is_that_of_one(tmp_path: Path, folder: str) -> None:
    whole, first = split_model(tmp_path)
    weights = [load_file(unpacked(each, folder) / "model.safetensors") for each in (whole, first)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    second = tmp_path / "m-00002-of-00003.gguf"
    with pytest.raises(CheckpointError, match="not the first part"):
        unpacked(second, folder)
    renamed = tmp_path / "renamed.gguf"
    renamed.write_bytes(first.read_bytes())
    with pytest.raises(CheckpointError, match="one of 3 parts, and is not named -00001-of-00003"):
        unpacked(renamed, folder)
    second.write_bytes((tmp_path / "m-00003-of-00003.gguf").read_bytes())
    with pytest.raises(CheckpointError, match=r"00002-of-00003\.gguf is not part 2 of 3"):
        unpacked(first, folder)
    second.unlink()
    with pytest.raises(CheckpointError, match="00002-of-00003"):
        unpacked(first, folder)


def small_halves(blocks: torch.Tensor, *places: int) -> None:
    for place in places:
        halves = torch.randn(len(blocks), 1).half()
        blocks[:, place : place + 2] = halves.view(torch.uint8)


def half_at(block: list[int], place: int) -> float:
    (number,) = struct.unpack("<e", bytes(block[place : place + 2]))
    return float(number)


def scale_and_offset(block: list[int], j: int) -> tuple[float, float]:
    """Return the numbers of sub-block j: 6 bits each, in 12 bytes from the fourth on."""
    q = block[4:16]
    if j < 4:
        scale, least = q[j] & 63, q[j + 4] & 63
    else:
        scale = (q[j + 4] & 15) | ((q[j - 4] >> 6) << 4)
        least = (q[j + 4] >> 4) | ((q[j] >> 6) << 4)
    return half_at(block, 0) * scale, half_at(block, 2) * least


def small_one(kind: str, block: list[int], i: int) -> float:
    """Number i of a block."""
    half, place = divmod(i, 128)
    quarter, at = divmod(place, 32)
    if kind == "Q2_K":
        code = block[16 + 32 * half + at] >> (2 * quarter) & 3
        packed = block[i // 16]
        return half_at(block, 80) * (packed & 15) * code - half_at(block, 82) * (packed >> 4)
    if kind == "Q3_K":
        code = block[32 + 32 * half + at] >> (2 * quarter) & 3
        code -= 0 if block[at] >> (i // 32) & 1 else 4
        j = i // 16
        low = block[96 + j % 8] >> (4 * (j // 8)) & 15
        scale = low | (block[104 + j % 4] >> (2 * (j // 4)) & 3) << 4
        return half_at(block, 108) * (scale - 32) * code
    first, at = (1, i) if kind == "MXFP4" else (8 + 16 * (i // 32), i % 32)
    byte = block[first + at % 16]
    code = byte >> 4 if at >= 16 else byte & 15
    if kind == "MXFP4":
        value = (0, 0.5, 1, 1.5, 2, 3, 4, 6)[code & 7] * (-1 if code & 8 else 1)
        return float(value * 2.0 ** (block[0] - 127))
    j = i // 32
    scale = (block[4 + j // 2] >> (4 * (j % 2)) & 15) | (
        block[2 + j // 4] >> (2 * (j % 4)) & 3
    ) << 4
    return half_at(block, 0) * (scale - 32) * IQ4[code]


def decoded(kind: str, block: list[int]) -> list[float]:
    """One block, a number at a time."""
    out = []
    if kind in ("Q2_K", "Q3_K", "IQ4_XS", "MXFP4"):
        return [small_one(kind, block, i) for i in range(32 if kind == "MXFP4" else 256)]
    if kind in ("Q4_K", "Q5_K"):
        numbers = block[16:] if kind == "Q4_K" else block[48:]
        for j in range(8):
            scale, least = scale_and_offset(block, j)
            for i in range(32):
                byte = numbers[32 * (j // 2) + i]
                number = byte >> 4 if j % 2 else byte & 15
                if kind == "Q5_K":
                    number += 16 * (block[16 + i] >> j & 1)
                out.append(scale * number - least)
        return out
    if kind == "Q6_K":
        for i in range(256):
            half, place = divmod(i, 128)
            quarter, at = divmod(place, 32)
            low = block[64 * half + 32 * (quarter % 2) + at]
            low = low >> 4 if quarter >= 2 else low & 15
            high = block[128 + 32 * half + at] >> (2 * quarter) & 3
            (scale,) = struct.unpack("b", bytes([block[192 + i // 16]]))
            out.append(half_at(block, 208) * scale * (low + 16 * high - 32))
        return out
    first = {"Q4_0": 2, "Q4_1": 4, "Q5_0": 6, "Q5_1": 8, "IQ4_NL": 2}[kind]
    for i in range(32):
        byte = block[first + i % 16]
        number = byte >> 4 if i >= 16 else byte & 15
        if kind.startswith("Q5"):
            bits = int.from_bytes(bytes(block[first - 4 : first]), "little")
            number += 16 * (bits >> i & 1)
        scale = half_at(block, 0)
        if kind.endswith("_1"):
            out.append(scale * number + half_at(block, 2))
        else:
            value = IQ4[number] if kind == "IQ4_NL" else number - (16 if "5" in kind else 8)
            out.append(scale * value)
    return out


@pytest.mark.parametrize("kind", [kind for kind in LAYOUTS if kind != "Q8_0"])
def test_blocks_stand_for_what_the_format_says(kind: str) -> None:
    torch.manual_seed(0)
    size = LAYOUTS[kind].size
    blocks = torch.randint(0, 256, (6, size), dtype=torch.uint8)
    places = {"Q6_K": (208,), "Q3_K": (108,), "Q2_K": (80, 82)}.get(
        kind, (0, 2) if kind[-2:] in ("_1", "_K") else (0,)
    )
    if kind == "MXFP4":
        blocks[:, 0] = torch.randint(120, 135, (6,), dtype=torch.uint8)
    else:
        small_halves(blocks, *places)
    expected = torch.tensor([decoded(kind, block) for block in blocks.tolist()])
    found = GgufBlocks(kind).reference({"weight": blocks.view(2, 3 * size)})
    torch.testing.assert_close(found, expected.view(2, -1), rtol=1e-6, atol=1e-6)


def test_the_tokenizer_of_bytes_is_that_of_the_file(tmp_path: Path, folder: str) -> None:
    tokens = bytes_tokens(300)
    vocabulary = {token: i for i, token in enumerate(tokens["tokenizer.ggml.tokens"])}
    merges = [tuple(each.split(" ")) for each in tokens["tokenizer.ggml.merges"]]
    expected = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    expected.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    expected.decoder = decoders.ByteLevel()
    source = tmp_path / "source"
    make_fake(Fake("Qwen2", {**SIZES, "vocab_size": 300}), HEADS).save_pretrained(source)
    gguf.write_model(source, tmp_path / "m.gguf", "qwen2", mixed, tokens)
    directory = unpacked(tmp_path / "m.gguf", folder)
    ours = Tokenizer.from_file(str(directory / "tokenizer.json"))
    for text in ("hello world", " two  spaces\n\nä 1212", "x<|end|>y"):
        ids = ours.encode(text).ids
        assert ours.decode(ids, skip_special_tokens=False) == text
        if "<|" not in text and "1212" not in text:
            assert ids == expected.encode(text).ids
    assert vocabulary["<|end|>"] in ours.encode("x<|end|>y").ids
    config = json.loads((directory / "tokenizer_config.json").read_text())
    assert (config["eos_token"], config["chat_template"]) == ("<|end|>", "{{ messages }}")
    assert (
        json.loads((directory / "config.json").read_text())["eos_token_id"]
        == len(pre_tokenizers.ByteLevel.alphabet()) + 8
    )


def pieces_tokens() -> dict[str, Any]:
    """A vocabulary of pieces with scores, and all bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    words = ["▁", "a", "b", "c", "ab", "▁a", "▁ab", "abc", "▁abc"]
    scores = [0.0] * len(pieces) + [-float(i) for i in range(len(words))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces + words,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(words),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def test_the_tokenizer_of_pieces_is_that_of_the_file(tmp_path: Path, folder: str) -> None:
    tokens = pieces_tokens()
    source = tmp_path / "source"
    size = len(tokens["tokenizer.ggml.tokens"])
    make_fake(Fake("Llama", {**SIZES, "vocab_size": size}), HEADS).save_pretrained(source)
    gguf.write_model(source, tmp_path / "m.gguf", "llama", mixed, tokens)
    ours = Tokenizer.from_file(str(unpacked(tmp_path / "m.gguf", folder) / "tokenizer.json"))
    assert isinstance(ours.post_processor, processors.TemplateProcessing)
    assert ours.encode("abc ab").tokens == ["<s>", "▁abc", "▁ab"]
    assert ours.encode("é").tokens == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    assert ours.decode(ours.encode("ab é c").ids) == "ab é c"


@pytest.mark.parametrize("tokens", [bytes_tokens(300), pieces_tokens()], ids=["bytes", "pieces"])
def test_a_files_tokenizer_is_loaded_as_transformers_loads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: dict[str, Any]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    size = len(tokens["tokenizer.ggml.tokens"])
    make_fake(Fake("Llama", {**SIZES, "vocab_size": size}), HEADS).save_pretrained(tmp_path)
    gguf.write_model(tmp_path, tmp_path / "m.gguf", "llama", mixed, tokens)
    found = load_model(ModelSettings(model=str(tmp_path / "m.gguf")))
    expected = load_model(ModelSettings(model=str(found.directory)))
    for name in ("vocab_size", "special_tokens", "special_ids", "templates", "eos_token_ids"):
        assert getattr(found, name) == getattr(expected, name)
    assert (found.has_type_ids, found.length_bound) == (
        expected.has_type_ids,
        expected.length_bound,
    )
    for text in ("hello world", "ab é c", "x<|end|>y</s>", ""):
        for adds in (False, True):
            ours = found.tokenizer.encode(text, text, add_special_tokens=adds)
            theirs = expected.tokenizer.encode(text, text, add_special_tokens=adds)
            assert (ours.ids, ours.type_ids) == (theirs.ids, theirs.type_ids)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    directory = tmp_path_factory.mktemp("whole")
    make_fake(Fake("Qwen2", {**SIZES, "vocab_size": 300}), HEADS).save_pretrained(directory)
    gguf.write_model(directory, directory / "m.gguf", "qwen2", mixed, bytes_tokens(300))
    return (directory / "m.gguf").read_bytes()


def refusal(tmp_path: Path, content: bytes) -> str:
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    with pytest.raises(CheckpointError) as error:
        unpacked(file, str(tmp_path / "cache"))
    assert not [each for each in (tmp_path / "cache").iterdir() if each.is_dir()]
    return error.value.message.replace(str(file), "FILE")


def test_a_file_that_is_cut_off_anywhere_is_refused(tmp_path: Path, whole: bytes) -> None:
    for length in (0, 3, 4, 7, 23, 24, 100, 5000, len(whole) // 2, len(whole) - 40):
        message = refusal(tmp_path, whole[:length])
        assert message.startswith("FILE: cannot be read as GGUF: ")
    assert "is the file complete?" in message


def test_files_that_lie_are_refused_before_memory_is_taken(tmp_path: Path, whole: bytes) -> None:
    huge = struct.pack("<Q", 1 << 60)
    for content, expected in (
        (b"GGML" + whole[4:], "it does not begin with GGUF"),
        (whole[:4] + struct.pack("<I", 9) + whole[8:], "it is of version 9; supported are 2, 3"),
        (whole[:8] + huge + whole[16:], f"{1 << 60} tensors do not fit the file"),
        (whole[:16] + huge + whole[24:], f"{1 << 60} values do not fit the file"),
        (whole[:24] + huge + whole[32:], "it ends within its header"),
    ):
        assert refusal(tmp_path, content) == f"FILE: cannot be read as GGUF: {expected}"


@pytest.mark.parametrize(
    ("shape", "kind", "expected"),
    [
        ((1 << 40, 1 << 20), 0, "of a file of"),
        ((0, 32), 0, "has shape [0, 32]"),
        ((2, 33), 8, "has shape [2, 33], which blocks of 32 do not fill"),
        ((2, 32), 16, "is of type IQ2_XXS; supported are F32"),
        ((1, 1, 1, 1, 1), 0, "has 5 dimensions"),
    ],
)
def test_absurd_tensors_are_refused(
    tmp_path: Path, shape: tuple[int, ...], kind: int, expected: str
) -> None:
    gguf.write(tmp_path / "t", {}, {"x.weight": (shape, (kind, b"\0" * 64, torch.empty(0)))})
    assert expected in refusal(tmp_path, (tmp_path / "t").read_bytes())


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"general.architecture": "mamba"}, "general.architecture is 'mamba'; supported are llama"),
        ({"qwen2.block_count": 0}, "qwen2.block_count is 0, not a whole number above 0"),
        ({"qwen2.expert_count": 8}, "qwen2.expert_count is set, which is not supported"),
        ({"qwen2.rope.scaling.type": "longrope", "qwen2.rope.scaling.factor": 2.0}, "longrope"),
        ({"tokenizer.ggml.pre": "viking"}, "tokenizer.ggml.pre is 'viking'; supported are"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model is 'bert'; supported are"),
        ({"tokenizer.ggml.eos_token_id": 5000}, "is 5000, which no token has"),
    ],
)
def test_metadata_that_is_not_served_is_named(
    tmp_path: Path, values: dict[str, Any], expected: str
) -> None:
    source = tmp_path / "source"
    make_fake(Fake("Qwen2", {**SIZES, "vocab_size": 300}), HEADS).save_pretrained(source)
    tokens = {**bytes_tokens(300), **values}
    gguf.write_model(source, tmp_path / "t", "qwen2", mixed, tokens)
    assert expected in refusal(tmp_path, (tmp_path / "t").read_bytes())

"""Whisper in CTranslate2 directories: what it computes, its tokens, and broken files."""

import json
import shutil
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import WhisperForConditionalGeneration

from tests.fakes import ctranslate2
from tests.fakes.ctranslate2 import Ct2Content, whisper_content, write_whisper
from tests.fakes.whisper import whisper
from tokenmesh.cli.embedded.plan import check_models
from tokenmesh.engine.models.location import locate
from tokenmesh.services.mm_encoder_svc.checkpoint import find_tower
from tokenmesh.services.tokenizer_svc.loading import load_model
from tokenmesh.services.tokenizer_svc.media.speech import speech_facts
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.ctranslate2 import Ct2File, unpacked
from tokenmesh.shared.errors import CheckpointError, ConfigError
from tokenmesh.shared.model_files import locate_model

PLAIN: Final = ctranslate2.plain(torch.float32)
LAYER: Final = "model.decoder.layers.1"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def content(source: Path) -> Ct2Content:
    return whisper_content(source, PLAIN)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "cache")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where caches of this user are."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("vocabulary", ["vocabulary.json", "vocabulary.txt"])
def test_a_directory_is_the_checkpoint_that_it_was_made_of(
    source: Path, content: Ct2Content, tmp_path: Path, folder: str, vocabulary: str
) -> None:
    directory = write_whisper(source, tmp_path / "model", content, vocabulary=vocabulary)
    found = unpacked(directory, folder)
    assert unpacked(directory, folder) == found
    ours, theirs = (load_file(each / "model.safetensors") for each in (found, source))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    ours, theirs = (
        json.loads((each / "generation_config.json").read_text()) for each in (found, source)
    )
    assert {name: ours.get(name) for name in theirs if name in ours} == {
        name: value for name, value in theirs.items() if name in ours
    }
    assert theirs.keys() - ours.keys() <= {
        "max_length",
        "transformers_version",
        "_from_model_config",
    }
    ours, theirs = (Tokenizer.from_file(str(each / "tokenizer.json")) for each in (found, source))
    assert ours.get_vocab(with_added_tokens=True) == theirs.get_vocab(with_added_tokens=True)
    ids = torch.tensor([[301, 302, 307, 20, 21, 22]])
    features = torch.randn(1, 16, 400, generator=torch.Generator().manual_seed(3))
    logits = []
    for each in (found, source):
        model: Any = WhisperForConditionalGeneration.from_pretrained(each, dtype=torch.float32)
        with torch.no_grad():
            logits.append(model.eval()(input_features=features, decoder_input_ids=ids).logits)
    assert torch.equal(logits[0], logits[1])


@pytest.mark.parametrize(
    ("store", "others"),
    [
        (ctranslate2.int8, torch.float32),
        (ctranslate2.int8, torch.float16),
        (ctranslate2.int8, torch.bfloat16),
        (ctranslate2.int16, torch.float32),
        (ctranslate2.plain(torch.float16), torch.float16),
        (ctranslate2.plain(torch.bfloat16), torch.bfloat16),
    ],
    ids=["int8", "int8_float16", "int8_bfloat16", "int16", "float16", "bfloat16"],
)
def test_weights_are_what_their_codes_stand_for(
    source: Path, tmp_path: Path, folder: str, store: ctranslate2.Store, others: torch.dtype
) -> None:
    content = whisper_content(source, store, others)
    found = unpacked(write_whisper(source, tmp_path / "model", content), folder)
    tensors = load_file(found / "model.safetensors")
    joined = {
        "decoder/layer_1/self_attention/linear_0": ("self_attn", "q_proj", "k_proj", "v_proj"),
        "decoder/layer_1/attention/linear_1": ("encoder_attn", "k_proj", "v_proj"),
    }
    for name, (part, *projections) in joined.items():
        weights = [tensors[f"{LAYER}.{part}.{each}.weight"] for each in projections]
        assert torch.equal(torch.cat(weights), content.number(f"{name}/weight").to(others))
    for name, own in {
        "encoder/conv1/weight": "model.encoder.conv1.weight",
        "decoder/embeddings/weight": "model.decoder.embed_tokens.weight",
        "decoder/layer_norm/gamma": "model.decoder.layer_norm.weight",
        "decoder/layer_1/ffn/linear_1/bias": f"{LAYER}.fc2.bias",
    }.items():
        assert torch.equal(tensors[own], content.number(name).to(others))
    config = json.loads((found / "config.json").read_text())
    assert config["dtype"] == str(others).removeprefix("torch.")


def test_an_output_layer_of_its_own_is_kept(
    source: Path, content: Ct2Content, tmp_path: Path, folder: str
) -> None:
    own = content.variables["decoder/embeddings/weight"] + 1
    untied = Ct2Content({**content.variables, "decoder/projection/weight": own})
    found = unpacked(write_whisper(source, tmp_path / "model", untied), folder)
    assert torch.equal(load_file(found / "model.safetensors")["proj_out.weight"], own)
    model: Any = WhisperForConditionalGeneration.from_pretrained(found, dtype=torch.float32)
    assert torch.equal(model.proj_out.weight, own)
    assert not torch.equal(model.model.decoder.embed_tokens.weight, own)


def test_equal_tensors_are_stored_once(
    source: Path, content: Ct2Content, tmp_path: Path, folder: str
) -> None:
    variables = dict(content.variables)
    shared = "decoder/layer_0/layer_norm/gamma".replace("layer_0/", "layer_0/ffn/")
    alias = "encoder/layer_1/ffn/layer_norm/gamma"
    del variables[alias]
    aliases = {alias: shared, **content.aliases}
    directory = write_whisper(source, tmp_path / "model", Ct2Content(variables, aliases))
    tensors = load_file(unpacked(directory, folder) / "model.safetensors")
    assert torch.equal(tensors["model.encoder.layers.1.final_layer_norm.weight"], variables[shared])


def test_a_tokenizer_is_made_of_the_vocabulary_where_there_is_none(
    source: Path, content: Ct2Content, tmp_path: Path, home: Path
) -> None:
    directory = write_whisper(source, tmp_path / "model", content)
    (directory / "tokenizer.json").unlink()
    (directory / "preprocessor_config.json").unlink()
    loaded = load_model(ModelSettings(model=str(directory)))
    theirs: Any = Tokenizer.from_file(str(source / "tokenizer.json"))
    for text in ("The quick brown fox, 0123!", "Grüße aus Köln\n", "你好 🙂", "<|de|> a <|0.50|>"):
        wanted = theirs.encode(text, add_special_tokens=False).ids
        assert loaded.tokenizer.encode(text, add_special_tokens=False).ids == wanted
        assert loaded.tokenizer.decode(wanted) == theirs.decode(wanted)
    assert loaded.eos_token_ids == [300]


def test_an_english_only_model_has_no_languages(
    source: Path, content: Ct2Content, tmp_path: Path, folder: str
) -> None:
    directory = write_whisper(source, tmp_path / "model", content)
    path = directory / "vocabulary.json"
    path.write_text(json.dumps([each or "x" for each in json.loads(path.read_text())]))
    found = json.loads((unpacked(directory, folder) / "generation_config.json").read_text())
    assert not {"lang_to_id", "task_to_id"} & found.keys()
    assert found["is_multilingual"] is False


def test_a_changed_file_is_read_anew(source: Path, content: Ct2Content, home: Path) -> None:
    directory = write_whisper(source, home / "model", content)
    first = locate_model(str(directory), None)
    assert locate_model(str(directory), None) == first
    assert locate_model(str(source), None) == source
    changed = dict(content.variables)
    changed["decoder/layer_norm/beta"] = changed["decoder/layer_norm/beta"] + 1
    write_whisper(source, directory, Ct2Content(changed, content.aliases))
    second = locate_model(str(directory), None)
    assert second != first
    tensors = load_file(second / "model.safetensors")
    own = tensors["model.decoder.layer_norm.bias"]
    assert torch.equal(own, changed["decoder/layer_norm/beta"])


def test_each_service_reads_it_as_it_reads_its_source(
    source: Path, content: Ct2Content, home: Path
) -> None:
    directory = write_whisper(source, home / "model", content)
    ours, theirs = (load_model(ModelSettings(model=str(each))) for each in (directory, source))
    assert speech_facts(ours, None) == speech_facts(theirs, None)
    for name in ("vocab_size", "eos_token_ids", "special_ids", "max_model_len", "default_sampling"):
        assert getattr(ours, name) == getattr(theirs, name)
    towers = [find_tower(str(each), None) for each in (directory, source)]
    assert all(tower is not None and tower.config["model_type"] == "whisper" for tower in towers)
    assert locate(ModelSettings(model=str(directory))) == ours.directory


def test_a_hub_id_brings_the_files_that_it_has(
    source: Path, content: Ct2Content, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote, local = write_whisper(source, home / "remote", content), home / "local"
    local.mkdir()

    def snapshot_download(
        model: str, revision: str | None = None, allow_patterns: Sequence[str] = ()
    ) -> str:
        assert (model, revision) == ("someone/faster-whisper", "main")
        for pattern in allow_patterns:
            for path in remote.glob(pattern):
                if not (local / path.name).exists():  # what is cached is not fetched again
                    shutil.copy2(path, local)
        return str(local)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    for patterns in (("tokenizer.json",), ("model*.safetensors*",), ("*.json",)):
        found = locate_model("someone/faster-whisper", "main", *patterns)
        assert found == unpacked(local)
    tensors = load_file(found / "model.safetensors")
    assert torch.equal(tensors["model.decoder.layer_norm.weight"], content.number(GAMMA))


def broken(content: Ct2Content, **changes: Any) -> Ct2Content:
    """changes: variables by name, None for one that is gone; and attributes."""
    variables = {**content.variables, **changes.pop("variables", {})}
    kept = {name: each for name, each in variables.items() if each is not None}
    return Ct2Content(kept, **{"aliases": content.aliases, **changes})


GAMMA: Final = "decoder/layer_norm/gamma"
QUERY: Final = "decoder/layer_0/attention/linear_0/weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 7}, "its version is 7, and version 6 is served"),
        ({"revision": 4}, "its revision is 4, and revision 3 of WhisperSpec"),
        ({"specification": "TransformerSpec"}, "it is a TransformerSpec; of CTranslate2's models"),
        ({"variables": {GAMMA: None}}, f"variable {GAMMA} is missing"),
        ({"variables": {QUERY: torch.ones(3, 3)}}, r"linear_0/weight has shape \[3, 3\], not"),
        ({"variables": {"decoder/lora": torch.ones(2)}}, "variable decoder/lora is not known"),
        ({"variables": {"decoder/layer_9/x": torch.ones(2)}}, r"holds layers \[0, 1, 2, 9\]"),
        (
            {"variables": {"decoder/activation": torch.tensor(0, dtype=torch.int8)}},
            "decoder/activation is 0: the activation of decoders other than GELU is not served",
        ),
        (
            {"variables": {"decoder/num_heads": torch.tensor(5, dtype=torch.int16)}},
            "decoder/num_heads is 5 for 32 columns",
        ),
        (
            {"variables": {QUERY: torch.ones((32, 32), dtype=torch.int8)}},
            f"variable {QUERY} is I8 with a scale that is none",
        ),
        (
            {
                "variables": {
                    QUERY: torch.ones((32, 32), dtype=torch.int8),
                    f"{QUERY}_scale": torch.zeros(32),
                }
            },
            f"variable {QUERY}_scale holds numbers that are not above 0",
        ),
        (
            {"variables": {QUERY: torch.ones((32, 32), dtype=torch.int32)}},
            f"variable {QUERY} is of type I32; known are F32, F16, BF16, and weights of I8 and I16",
        ),
        ({"aliases": {"decoder/projection/weight": "none"}}, "names variable none"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    source: Path,
    content: Ct2Content,
    tmp_path: Path,
    folder: str,
    changes: dict[str, Any],
    message: str,
) -> None:
    directory = write_whisper(source, tmp_path / "model", broken(content, **changes))
    with pytest.raises(CheckpointError, match=message):
        unpacked(directory, folder)
    assert not list(Path(folder).glob("*-*/")), "nothing stays of what cannot be made"


def hostile(content: bytes) -> dict[str, tuple[bytes, str]]:
    """By what is wrong with it: a file, and the error."""
    name = b"decoder/embeddings/weight\0"
    shape = content.index(name) + len(name) + 1
    header = len(Ct2Content({}).encode()) - 8  # before the number of variables
    most = b"\xff" * 4
    size = shape + 9
    return {
        "empty": (b"", "the download has not written it"),
        "pointer": (b"version https://git-lfs.github.com/spec/v1\noid 1", "pointer of git-lfs"),
        "cut": (content[: len(content) // 2], "bytes before the end of variable"),
        "header": (content[:30], "it ends within a name at byte 30"),
        "long": (content + b"0", "1 bytes follow its last variable"),
        "count": (content[:header] + most + content[header + 4 :], "it has 4294967295 variables"),
        "shape": (content[:shape] + most * 2 + content[size - 1 :], "bytes for F32"),
        "bytes": (content[:size] + most + content[size + 4 :], "has 4294967295 bytes for F32"),
        "both": (
            content[:shape] + struct.pack("<IIBI", 1 << 15, 1 << 14, 0, 1 << 31),
            "bytes before the end of variable decoder/embeddings/weight",
        ),
        "noise": (bytes(range(256)) * 40, "its version is 50462976"),
    }


MODEL: Final = Ct2Content({"decoder/embeddings/weight": torch.ones(2, 2)}).encode()
"""Only the names of its variables are taken, as cases."""


@pytest.mark.parametrize("what", sorted(hostile(MODEL)))
def test_a_broken_file_is_named_before_memory_is_taken(
    source: Path, content: Ct2Content, tmp_path: Path, folder: str, what: str
) -> None:
    directory = write_whisper(source, tmp_path / "model", content)
    found, message = hostile(content.encode())[what]
    (directory / "model.bin").write_bytes(found)
    with pytest.raises(CheckpointError, match=message) as caught:
        unpacked(directory, folder)
    assert str(directory / "model.bin") in str(caught.value)
    settings = Settings(models=(ModelSettings(model=str(directory)),))
    with pytest.raises(ConfigError, match=message):
        check_models(settings)


def test_every_cut_and_every_changed_byte_is_read_or_named(tmp_path: Path) -> None:
    variables = {"encoder/a/weight": torch.ones(2, 2), "encoder/a/bias": torch.ones(2)}
    whole = Ct2Content(variables, {"b": "encoder/a/bias"}).encode()
    path = tmp_path / "model.bin"
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        with pytest.raises(CheckpointError):
            Ct2File.read(tmp_path)
    for index in range(len(whole)):
        for bits in (1, 128, 255):
            path.write_bytes(whole[:index] + bytes([whole[index] ^ bits]) + whole[index + 1 :])
            with suppress(CheckpointError):
                found = Ct2File.read(tmp_path)
                assert all(each.num_bytes < len(whole) for each in found.variables.values())


FILES: Final[dict[str, tuple[str, Callable[[Any], Any], str]]] = {
    "short": ("vocabulary.json", lambda each: each[:-1], "has 512 tokens, and the embedding"),
    "unnamed": (
        "vocabulary.json",
        lambda each: ["x" if token == "<|translate|>" else token for token in each],
        r"lacks the token <\|translate\|>",
    ),
    "object": ("vocabulary.json", lambda each: {"tokens": each}, "is not a list of tokens"),
    "other": (
        "tokenizer.json",
        lambda each: {**each, "added_tokens": each["added_tokens"][1:]},
        r"<\|endoftext\|> is ",
    ),
    "no tokenizer": ("tokenizer.json", lambda each: {"model": {}}, "is not a tokenizer"),
    "bins": (
        "preprocessor_config.json",
        lambda each: {**each, "feature_size": 80},
        "feature_size is 80, and the model takes 16 bins",
    ),
}


@pytest.mark.parametrize("what", sorted(FILES))
def test_files_beside_the_weights_have_to_fit_them(
    source: Path, content: Ct2Content, tmp_path: Path, folder: str, what: str
) -> None:
    directory = write_whisper(source, tmp_path / "model", content)
    name, change, message = FILES[what]
    path = directory / name
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(CheckpointError, match=message):
        unpacked(directory, folder)


def test_a_directory_without_a_vocabulary_is_named(
    source: Path, content: Ct2Content, tmp_path: Path, folder: str
) -> None:
    directory = write_whisper(source, tmp_path / "model", content)
    (directory / "vocabulary.json").unlink()
    with pytest.raises(CheckpointError, match=r"neither vocabulary\.json nor vocabulary\.txt"):
        unpacked(directory, folder)
    shutil.rmtree(directory)
